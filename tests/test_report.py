"""Plans and reports: what they say, and what they do not hold."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import pytest
import torch
from torch import nn

import devconv
from devconv import Route


def _tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model(torch.ones(3, 2)).sum().backward()
    return model


def test_a_plan_changes_nothing_and_names_every_place_of_a_tied_tensor():
    model = _tied()
    weight = model[0].weight

    plan = devconv.plan(model, "meta")

    assert weight.device.type == "cpu"
    assert next(item for item in plan.items if item.kind == "parameter").names == ("0.weight", "1.weight")
    assert plan.ties == 1


def test_a_plan_and_its_report_tell_the_same():
    model = _tied()
    plan = devconv.plan(model, "meta")

    report = devconv.convert(model, "meta")

    assert report.items == plan.items
    assert report.routes == plan.routes == {Route.SWAP: 10, Route.OVERWRITE: 3}


def test_bytes_are_those_that_arrive():
    report = devconv.convert(nn.Linear(4, 2, bias=False), dtype=torch.float64)

    assert report.bytes == 4 * 2 * 8


def test_a_no_op_reports_nothing():
    report = devconv.convert(nn.Linear(4, 2), "cpu")

    assert (report.items, report.bytes) == ((), 0)


@pytest.mark.parametrize("make", [devconv.plan, devconv.convert])
def test_text_and_json_name_the_tensors(make):
    made = make(_tied(), "meta")

    assert "0.weight = 1.weight" in str(made)
    assert json.loads(made.to_json())["items"][0]["names"] == ["0.weight", "1.weight"]


def test_a_long_table_says_how_much_it_leaves_out():
    text = str(devconv.plan(nn.Sequential(*(nn.Linear(1, 1) for _ in range(30))), "meta"))

    assert "and 20 more" in text


def test_refusals_stand_in_the_plan():
    plan = devconv.plan(nn.Linear(2, 2, device="meta"), "cpu")

    assert [refusal.name for refusal in plan.refusals] == ["weight", "bias"]
    assert "to_empty" in str(plan)


def test_a_report_that_is_kept_keeps_no_model():
    model = _tied()
    seen = weakref.ref(model)
    report = devconv.convert(model, "meta")

    del model
    gc.collect()

    assert seen() is None
    assert len(report.items) == 13


def test_the_last_report_is_of_this_thread():
    devconv.convert(nn.Linear(1, 1), "meta")
    mine, theirs = devconv.last_report(), []

    thread = threading.Thread(target=lambda: theirs.append(devconv.last_report()))
    thread.start()
    thread.join(60)

    assert mine is not None
    assert theirs == [None]
