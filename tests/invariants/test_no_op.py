"""Promise: a conversion to where the model already is touches nothing at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import devconv
from tests.moves import Move, named_tensors
from tests.promises import where
from tests.zoo import MODELS, Tied, loss_of, mlp

# One conversion for each source device is enough: the no-op stays there.
pytestmark = where(lambda conversion: conversion.name in ("float64", "xla:0-cpu", "cuda:0-cpu", "acme:0-cpu"))


class Operations(TorchDispatchMode):
    """Counts every operation that reaches a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_every_object_stays(move: Move, name: str) -> None:
    model = move.build(MODELS[name])
    before = dict(named_tensors(model))

    move.stay(model)

    assert [key for key, tensor in named_tensors(model) if tensor is not before[key]] == []


@pytest.mark.parametrize("name", MODELS)
def test_version_counters_stay(move: Move, name: str) -> None:
    model = move.build(MODELS[name])
    versions = {key: tensor._version for key, tensor in named_tensors(model)}

    move.stay(model)

    assert {key: tensor._version for key, tensor in named_tensors(model)} == versions


@pytest.mark.parametrize("name", ["mlp", "normed", "tied"])
def test_nothing_is_computed_or_allocated(move: Move, name: str) -> None:
    model = move.build(MODELS[name])
    loss_of(model, 0).backward()
    move.stay(model)

    with Operations() as operations:
        move.stay(model)

    assert operations.seen == []


def test_memory_stays_where_it_is(move: Move) -> None:
    model = move.build(Tied)
    addresses = {key: tensor.untyped_storage()._cdata for key, tensor in named_tensors(model)}

    move.stay(model)

    assert {key: tensor.untyped_storage()._cdata for key, tensor in named_tensors(model)} == addresses


def test_gradients_stay(move: Move) -> None:
    model = move.build(mlp)
    loss_of(model, 0).backward()
    before = [parameter.grad for parameter in model.parameters()]

    move.stay(model)

    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), before, strict=True))


def test_a_graph_recorded_before_stays_whole(move: Move) -> None:
    model, twin = move.build(mlp), move.build(mlp)
    loss = loss_of(model, 0)
    loss_of(twin, 0).backward()

    move.stay(model)
    loss.backward()

    assert torch.equal(model[0].weight.grad.cpu(), twin[0].weight.grad.cpu())


def _weak(model: nn.Module) -> Any:
    return weakref.ref(model[0].weight)


def _view(model: nn.Module) -> Any:
    return model[0].weight[0]


def _alias(model: nn.Module) -> Any:
    return model[0].weight.detach()


@pytest.mark.parametrize("hold", [_weak, _view, _alias])
def test_what_would_hold_a_parameter_back_does_not_matter(move: Move, hold: Callable[[nn.Module], Any]) -> None:
    model = move.build(mlp)
    weight, held = model[0].weight, hold(model)

    move.stay(model)

    assert model[0].weight is weight
    assert held is not None


def test_the_optimizer_is_left_alone(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    loss_of(model, 0).backward()
    optimizer.step()
    before = [(id(state), [id(value) for value in state.values()]) for state in optimizer.state.values()]

    move.stay(model, optimizer)

    assert [(id(s), [id(value) for value in s.values()]) for s in optimizer.state.values()] == before


def test_the_report_says_that_nothing_was_done(move: Move) -> None:
    model = move.build(Tied)

    move.stay(model)

    if not move.by_devconv:
        pytest.skip("not applicable: stock torch reports nothing")
    assert set(move.report.routes) <= {devconv.Route.KEEP}
    assert move.report.bytes == 0


def test_a_device_without_index_is_the_current_one(move: Move) -> None:
    model = move.build(mlp)
    before = dict(named_tensors(model))

    move.stay(model, device=move.source.type)

    assert [key for key, tensor in named_tensors(model) if tensor is not before[key]] == []


def test_the_host_with_an_index_is_the_host(move: Move) -> None:
    if move.source.type != "cpu":
        pytest.skip("not applicable: the other devices have indexes")
    model = move.build(mlp)
    versions = {key: (id(tensor), tensor._version) for key, tensor in named_tensors(model)}

    move.stay(model, device="cpu:0")

    assert {key: (id(tensor), tensor._version) for key, tensor in named_tensors(model)} == versions
