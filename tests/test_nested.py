"""Nested inputs on another device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

import devconv


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str


@pytest.mark.parametrize(
    ("value", "pick"),
    [
        pytest.param(lambda: torch.ones(2), lambda v: v, id="tensor"),
        pytest.param(lambda: [torch.ones(2)], lambda v: v[0], id="list"),
        pytest.param(lambda: (torch.ones(2), 3), lambda v: v[0], id="tuple"),
        pytest.param(lambda: {"x": {"y": torch.ones(2)}}, lambda v: v["x"]["y"], id="dict"),
        pytest.param(lambda: OrderedDict(x=torch.ones(2)), lambda v: v["x"], id="ordered-dict"),
        pytest.param(lambda: Pair(torch.ones(2), None), lambda v: v.left, id="named-tuple"),
        pytest.param(lambda: Batch(torch.ones(2), "n"), lambda v: v.x, id="dataclass"),
        pytest.param(lambda: nn.utils.rnn.pack_sequence([torch.ones(2, 1)]), lambda v: v.data, id="packed-sequence"),
    ],
)
def test_the_structure_stays_and_the_tensors_move(value, pick):
    before = value()

    after = devconv.move(before, "meta")

    assert type(after) is type(before)
    assert pick(after).device.type == "meta"
    assert pick(before).device.type == "cpu"


def test_a_tensor_that_is_there_already_is_the_same_object():
    tensor = torch.ones(2)

    assert devconv.move([tensor], "cpu")[0] is tensor


def test_one_tensor_in_two_places_stays_one():
    tensor = torch.ones(2)

    first, second = devconv.move([tensor, tensor], "meta")

    assert first is second


def test_a_dtype_reaches_floating_point_tensors_only():
    floats, integers = devconv.move([torch.ones(2), torch.ones(2, dtype=torch.int64)], "cpu", torch.float64)

    assert (floats.dtype, integers.dtype) == (torch.float64, torch.int64)


def test_a_graph_goes_through_the_move():
    leaf = torch.ones(2, requires_grad=True)

    devconv.move(leaf, "cpu", torch.float64).sum().backward()

    assert torch.equal(leaf.grad, torch.ones(2))


def test_what_holds_no_tensor_is_returned_as_it_is():
    thing = object()

    assert devconv.move({"a": thing, "b": 3}, "meta") == {"a": thing, "b": 3}


def test_modules_are_left_alone():
    layer = nn.Linear(1, 1)

    assert devconv.move([layer], "meta")[0] is layer
    assert layer.weight.device.type == "cpu"


def test_an_unknown_device_is_named():
    with pytest.raises(devconv.UnknownDeviceError, match="banana"):
        devconv.move([torch.ones(1)], "banana")


def test_nothing_that_was_moved_waits_for_the_collector() -> None:
    import gc
    import weakref

    gc.disable()
    try:
        moved = devconv.move({"x": [torch.ones(2)]}, "meta")
        tensor = weakref.ref(moved["x"][0])
        del moved
        assert tensor() is None
    finally:
        gc.enable()
