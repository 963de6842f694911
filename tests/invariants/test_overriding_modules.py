"""Promise: modules that bring their own ``_apply`` are entered through it, and arrive as they would in stock torch."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.moves import Move, named_tensors, same
from tests.promises import where, with_same_objects, with_values
from tests.zoo import mlp

Function = Callable[[Tensor], Tensor]


class OwnTensor(nn.Module):
    """Calls fn on a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.own = torch.arange(3.0)
        self.calls = 0

    def _apply(self, fn: Function, recurse: bool = True) -> OwnTensor:
        super()._apply(fn, recurse)
        self.own = fn(self.own)
        self.calls += 1
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Scaling(nn.Module):
    """Wraps fn: what its layer gets is ten times what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def _apply(self, fn: Function, recurse: bool = True) -> Scaling:
        return super()._apply(lambda tensor: fn(tensor) * 10, recurse)


class Frozen(nn.Module):
    """Keeps its dtype, whatever the model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def _apply(self, fn: Function, recurse: bool = True) -> Frozen:
        return super()._apply(lambda tensor: tensor.to(fn(tensor.new_empty(0)).device), recurse)


class Raising(nn.Module):
    """Fails after its children were entered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.entered: list[str] = []
        self.broken = True

    def _apply(self, fn: Function, recurse: bool = True) -> Raising:
        self.entered.append("in")
        super()._apply(fn, recurse)
        if self.broken:
            raise ValueError("no thanks")
        return self


class Unmoved(nn.Module):
    """Does not move at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def _apply(self, fn: Function, recurse: bool = True) -> Unmoved:
        return self


class Rebuilding(nn.Module):
    """Puts a new object in a slot by itself, as quantised layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))

    def _apply(self, fn: Function, recurse: bool = True) -> Rebuilding:
        super()._apply(fn, recurse)
        self.derived = self.weight.detach().clone()
        return self


class Hiding(nn.Module):
    """Passes fn on to a module that it keeps in a plain list, where ``modules()`` does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.hidden = [nn.Linear(4, 2)]
        self.hidden[0].register_buffer("table", torch.ones(2))

    def _apply(self, fn: Function, recurse: bool = True) -> Hiding:
        super()._apply(fn, recurse)
        for module in self.hidden:
            module._apply(fn)
        return self


def beside(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The module between two ordinary layers."""
    return lambda: nn.ModuleDict({"before": nn.Linear(4, 2), "it": make(), "after": nn.Linear(4, 2)})


def test_a_tensor_of_the_modules_own_goes_along(move: Move) -> None:
    model = move.build(beside(OwnTensor))

    move(model)

    assert (model.it.own.device, model.it.own.dtype) == (move.device, move.dtype)
    assert model.it.calls == len(move.conversion.hops)


@with_values
def test_a_tensor_of_the_modules_own_keeps_its_value(move: Move) -> None:
    model = move.build(beside(OwnTensor))

    move(model)

    assert same(model.it.own, torch.arange(3.0, dtype=move.dtype))


@with_same_objects
def test_parameters_of_an_overriding_module_are_the_objects_they_were(move: Move) -> None:
    model = move.build(beside(OwnTensor))
    before = dict(model.named_parameters())

    move(model)

    assert [key for key, parameter in model.named_parameters() if parameter is not before[key]] == []


def test_a_function_of_the_users_runs_once_for_each_tensor_of_such_a_module(move: Move) -> None:
    model = move.build(beside(OwnTensor))
    expected = sorted([*(tensor.shape for _, tensor in named_tensors(model)), model.it.own.shape])
    asked: list[torch.Size] = []

    def function(tensor: Tensor) -> Tensor:
        asked.append(tensor.shape)
        return tensor.to(device=move.device, dtype=move.dtype)

    move.apply(model, function)

    assert sorted(asked) == expected


@with_values
@where(lambda conversion: len(conversion.hops) == 1)
def test_a_module_that_wraps_fn_gets_what_its_wrapper_makes(move: Move) -> None:
    model = move.build(beside(Scaling))
    expected = move.cast(model.it.layer.weight) * 10
    ordinary = move.cast(model.after.weight)

    move(model, route=None)

    assert same(model.it.layer.weight, expected)
    assert same(model.after.weight, ordinary)


@where(lambda conversion: conversion.keeps_device)
def test_a_module_that_keeps_its_dtype_keeps_it(move: Move) -> None:
    model = move.build(beside(Frozen))

    move(model, route=None)

    assert model.it.layer.weight.dtype is torch.float32
    assert model.after.weight.dtype is move.dtype


@where(lambda conversion: not conversion.keeps_device)
def test_a_module_that_keeps_its_dtype_still_changes_device(move: Move) -> None:
    model = move.build(beside(Frozen))

    move(model, route=None)

    assert {parameter.device for parameter in model.parameters()} == {move.device}


def test_a_module_that_does_not_move_stays(move: Move) -> None:
    model = move.build(beside(Unmoved))
    before = dict(model.it.named_parameters())

    move(model, route=None)

    assert all(parameter is before[key] for key, parameter in model.it.named_parameters())
    assert (model.it.layer.weight.device, model.it.layer.weight.dtype) == (move.source, torch.float32)
    assert model.after.weight.device == move.device


def test_what_a_module_makes_afterwards_comes_from_the_moved_tensors(move: Move) -> None:
    model = move.build(beside(Rebuilding))

    move(model)

    assert (model.it.derived.device, model.it.derived.dtype) == (move.device, move.dtype)


def test_a_module_that_raises_leaves_the_whole_model_as_it_was(move: Move) -> None:
    model = move.build(beside(Raising))
    before = {key: (id(t), t.device, t.dtype) for key, t in named_tensors(model)}

    with pytest.raises(ValueError, match="no thanks"):
        move(model)

    assert {key: (id(t), t.device, t.dtype) for key, t in named_tensors(model)} == before
    assert model.it.entered == []


def test_a_module_that_raised_can_be_moved_once_it_is_mended(move: Move) -> None:
    model = move.build(beside(Raising))
    with pytest.raises(ValueError, match="no thanks"):
        move(model)
    model.it.broken = False

    move(model)

    assert {parameter.device for parameter in model.parameters()} == {move.device}


def test_an_apply_on_the_instance_counts_too(move: Move) -> None:
    model = move.build(beside(mlp))
    seen: list[str] = []

    def apply(self: nn.Module, fn: Function, recurse: bool = True) -> nn.Module:
        seen.append("instance")
        return nn.Module._apply(self, fn, recurse)

    model.it._apply = types.MethodType(apply, model.it)

    move(model)

    assert seen == ["instance"] * len(move.conversion.hops)
    assert {parameter.device for parameter in model.parameters()} == {move.device}


def test_overriding_modules_inside_overriding_modules_are_each_entered_once(move: Move) -> None:
    def make() -> nn.Module:
        outer = OwnTensor()
        outer.inner = OwnTensor()
        outer.inner.deep = nn.LSTM(2, 2)
        return outer

    model = move.build(beside(make))

    move(model)

    hops = len(move.conversion.hops)
    assert (model.it.calls, model.it.inner.calls) == (hops, hops)
    assert model.it.inner.own.device == move.device
    assert model.it.inner.deep._flat_weights[0] is model.it.inner.deep.weight_ih_l0


def test_a_tie_into_an_overriding_module_stays(move: Move) -> None:
    def make() -> nn.Module:
        model = beside(OwnTensor)()
        model.it.layer.weight = model.after.weight
        return model

    model = move.build(make)

    move(model)

    assert model.it.layer.weight is model.after.weight


def test_a_module_that_only_the_override_knows_moves_too(move: Move) -> None:
    model = move.build(beside(Hiding))

    move(model)

    hidden = model.it.hidden[0]
    assert {(t.device, t.dtype) for _, t in named_tensors(hidden)} == {(move.device, move.dtype)}


@with_same_objects
def test_the_parameters_of_such_a_module_are_the_objects_they_were(move: Move) -> None:
    model = move.build(beside(Hiding))
    weight = model.it.hidden[0].weight
    weight.owner = "me"

    move(model)

    assert model.it.hidden[0].weight is weight
    assert weight.owner == "me"


def test_gradients_and_hooks_of_such_a_module_are_carried(move: Move) -> None:
    model = move.build(beside(Hiding))
    fired: list[str] = []
    hidden = model.it.hidden[0]
    hidden.weight.register_hook(lambda _: fired.append("hook"))
    hidden(move.inputs_before(5, 4)).sum().backward()

    move(model, route=None)
    hidden(move.inputs(5, 4)).sum().backward()

    assert (hidden.weight.grad.device, hidden.weight.grad.dtype) == (move.device, move.dtype)
    assert fired == ["hook", "hook"]


@with_values
def test_an_optimizer_of_such_a_module_follows(move: Move) -> None:
    model = move.build(beside(Hiding))
    held = [*model.parameters(), *model.it.hidden[0].parameters()]
    optimizer = torch.optim.SGD(held, 0.1, momentum=0.9)
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    move(model, optimizer, route=None)
    now = [*model.parameters(), *model.it.hidden[0].parameters()]
    for parameter in now:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    found = {(s["momentum_buffer"].device, s["momentum_buffer"].dtype) for s in optimizer.state.values()}
    assert found == {(move.device, move.dtype)}


def test_such_a_module_is_put_back_when_the_conversion_fails(move: Move) -> None:
    model = move.build(beside(Hiding))
    model.last = Raising()
    before = {key: (id(t), t.device, t.dtype) for key, t in named_tensors(model.it.hidden[0])}

    with pytest.raises(ValueError, match="no thanks"):
        move(model)

    assert {key: (id(t), t.device, t.dtype) for key, t in named_tensors(model.it.hidden[0])} == before


class Watched(nn.Module):
    """A layer with a metric that counts what went through it."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.metric = metric


def watched() -> Watched:
    metrics = pytest.importorskip("torchmetrics")
    metric = metrics.MeanSquaredError()
    metric.update(torch.ones(3), torch.zeros(3))
    return Watched(metric)


@with_values
def test_a_metric_arrives_as_in_stock_torch(move: Move) -> None:
    # torchmetrics keeps its state outside parameters and buffers, and reads fn's name to tell the doors apart.
    model, twin = watched().to(move.source), watched().to(move.source)

    move(model, route=None)
    for hop in move.conversion.hops:
        twin.to(device=hop.device, dtype=hop.dtype)

    assert model.metric.sum_squared_error.device == twin.metric.sum_squared_error.device == move.device
    assert model.metric.sum_squared_error.dtype == twin.metric.sum_squared_error.dtype
    assert float(model.metric.compute()) == 1.0
    assert model.metric.device == move.device


@with_values
def test_a_metric_goes_on_counting_and_can_be_reset(move: Move) -> None:
    model = watched().to(move.source)

    move(model, route=None)
    model.metric.update(torch.ones(3, device=move.device), torch.ones(3, device=move.device))
    counted = float(model.metric.compute())
    model.metric.reset()

    assert counted == 0.5
    assert model.metric.total.device == move.device


@where(lambda conversion: conversion.name == "float64")
@pytest.mark.parametrize("door", ["half", "double", "bfloat16", "float"])
def test_a_metric_tells_the_doors_apart_as_in_stock_torch(move: Move, door: str) -> None:
    import devconv

    if move.mode != "flag":
        pytest.skip("not applicable: the door is nn.Module's")
    model = watched()
    twin = copy.deepcopy(model)
    getattr(twin, door)()

    with devconv.registry_conversion():
        getattr(model, door)()

    assert model.metric.sum_squared_error.dtype is twin.metric.sum_squared_error.dtype
    assert model.layer.weight.dtype is twin.layer.weight.dtype


def test_a_tree_with_an_override_is_entered_even_when_nothing_moves(move: Move) -> None:
    model = move.build(beside(OwnTensor))
    model.it.own = torch.ones(3, dtype=torch.float64, device=move.source) if move.source.type == "cpu" else model.it.own

    move.stay(model)

    assert model.it.calls == 1
    assert model.it.own.dtype is torch.float32
