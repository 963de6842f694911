"""Tensors that nothing distinguishes, in columns; what is special stands out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import devconv
from devconv.survey import Inventory, survey, walk


def _surveyed(model: nn.Module) -> Inventory:
    inventory = walk(model)
    survey(inventory)
    return inventory


def _plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_plain_model_is_parameters_and_buffers() -> None:
    model = _plain()

    crowds = _surveyed(model).crowds

    assert [crowd.parameter for crowd in crowds] == [True, False]
    assert crowds[0].names() == [name for name, _ in model.named_parameters()]
    assert crowds[1].names() == [name for name, _ in model.named_buffers()]


def _tie(model: nn.Sequential) -> None:
    model.tied = model[0].weight


def _grade(model: nn.Sequential) -> None:
    model[0].weight.grad = torch.ones(3, 2)


def _learn(model: nn.Sequential) -> None:
    model[1].running_mean.requires_grad_()


def _alias(model: nn.Sequential) -> None:
    model.register_buffer("view", model[0].weight.data[1:])


def _hold(model: nn.Sequential) -> None:
    model.loss = [model[0](torch.ones(1, 2)).sum()]


def _sparsify(model: nn.Sequential) -> None:
    model.register_buffer("mask", torch.eye(2).to_sparse())


def _complete(model: nn.Sequential) -> None:
    model.lazy = nn.LazyLinear(2)


def _subclass(model: nn.Sequential) -> None:
    model.own = type("Own", (nn.Parameter,), {})(torch.ones(1))


def _grade_with_a_buffer(model: nn.Sequential) -> None:
    model.register_buffer("memory", torch.ones(3, 2))
    model[0].weight.grad = model.memory


@pytest.mark.parametrize(
    ("change", "special"),
    [
        (_tie, {"0.weight"}),
        (_grade, {"0.weight", "0.weight.grad"}),
        (_learn, {"1.running_mean"}),
        (_alias, {"0.weight", "view"}),
        (_hold, {"0.weight", "0.bias"}),
        (_sparsify, {"mask"}),
        (_complete, {"lazy.weight", "lazy.bias"}),
        (_subclass, {"own"}),
        (_grade_with_a_buffer, {"0.weight", "memory"}),
    ],
)
def test_what_is_special_stands_out_alone(change: Callable[[nn.Sequential], None], special: set[str]) -> None:
    model = _plain()
    change(model)

    inventory = _surveyed(model)

    names = {name for entry in inventory.entries for name in entry.names}
    assert special <= names | {"memory"}
    others = {name for crowd in inventory.crowds for name in crowd.names()}
    assert others.isdisjoint(special)
    assert "2.weight" in others
    assert "1.running_var" in others


@pytest.mark.parametrize("change", [_tie, _grade, _alias, _complete, lambda _: None])
def test_the_report_names_every_tensor_in_the_order_of_the_walk(change: Callable[[nn.Sequential], None]) -> None:
    model = _plain()
    change(model)
    plain = [item.names[0] for item in devconv.plan(model, "meta").items]

    inventory = _surveyed(model)
    inventory.expand()

    assert plain == [entry.name for entry in inventory.entries]


def test_a_crowd_of_two_dtypes_is_decided_apart() -> None:
    model = _plain()
    model[2].double()

    report = devconv.convert(model, dtype=torch.float64)

    routes = {item.names[0]: str(item.route) for item in report.items}
    assert routes["0.weight"] == "set-data"
    assert routes["2.weight"] == "keep"


def test_places_where_none_stands_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, track_running_stats=False))

    crowds = _surveyed(model).crowds

    assert [name for crowd in crowds for name in crowd.names()] == ["0.weight", "1.weight", "1.bias"]
