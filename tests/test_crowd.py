"""Tensors that nothing distinguishes, in columns; what is special stands out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import devconv
from devconv import conversion
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


@pytest.mark.parametrize("first", [False, True])
def test_parameters_made_under_inference_mode_are_decided_apart(first: bool) -> None:
    with torch.inference_mode(first):
        model = nn.Sequential(nn.Linear(2, 2))
    with torch.inference_mode(not first):
        model.append(nn.Linear(2, 2))

    report = devconv.convert(model, dtype=torch.float64)

    routes = {item.names[0]: str(item.route) for item in report.items}
    made, others = ("0", "1") if first else ("1", "0")
    assert (routes[f"{made}.weight"], routes[f"{others}.weight"]) == ("swap", "set-data")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_a_model_that_is_there_already_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, surveyed = _plain(), []
    monkeypatch.setattr(conversion, "survey", surveyed.append)

    report = devconv.convert(model, "cpu", torch.float32)

    assert surveyed == []
    assert list(report.items) == []


def test_an_optimizer_follows_a_crowd() -> None:
    model = _plain()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert _surveyed(model).entries == []

    devconv.convert(model, dtype=torch.float64, optimizers=optimizer)

    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float64}


def test_places_where_none_stands_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, track_running_stats=False))

    crowds = _surveyed(model).crowds

    assert [name for crowd in crowds for name in crowd.names()] == ["0.weight", "1.weight", "1.bias"]


def test_a_table_in_an_order_of_its_own_keeps_its_values() -> None:
    model = nn.Module()
    table: OrderedDict[str, torch.Tensor] = OrderedDict(a=torch.zeros(2), b=torch.ones(3))
    table.move_to_end("a")
    model._buffers = table

    devconv.convert(model, dtype=torch.float64)

    assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {"b": [1.0] * 3, "a": [0.0] * 2}


@pytest.mark.parametrize("target", [{"dtype": torch.float64}, {"device": "meta"}])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_that_is_a_buffer_further_up_stays_both(target: dict[str, Any], frozen: bool) -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 1)
    model.layer.weight.grad = torch.ones(1, 2)
    model.register_buffer("memory", model.layer.weight.grad)
    model.layer.weight.requires_grad_(not frozen)
    before = model.memory

    devconv.convert(model, **target)

    assert model.layer.weight.grad is model.memory is before
    assert model.memory.dtype is model.layer.weight.dtype
    assert model.memory.device == model.layer.weight.device


def test_a_frozen_parameter_that_is_a_buffer_further_up_keeps_its_gradient() -> None:
    model = nn.Module()
    layer = nn.Linear(2, 1)
    layer.weight.requires_grad_(False)
    layer.weight.grad = torch.ones(1, 2)
    model.register_buffer("same", layer.weight)
    model.layer = layer

    devconv.convert(model, dtype=torch.float64)

    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float64
    assert model.same is layer.weight


def test_a_parameter_that_is_the_gradient_of_another_is_moved() -> None:
    model = nn.Linear(2, 1)
    model.slope = nn.Parameter(torch.ones(1, 2))
    model.weight.grad = model.slope

    devconv.convert(model, dtype=torch.float64)

    assert model.weight.grad is model.slope
    assert model.slope.dtype is torch.float64
