"""Promise: a ``loss`` still held in a variable neither stops the move, nor is broken by it, nor keeps the old model's
memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.moves import Move, close
from tests.promises import where, with_same_objects, with_values
from tests.zoo import fill, loss_of, mlp, train


@with_same_objects
def test_the_loss_of_the_last_step_does_not_stop_the_move(move: Move) -> None:
    model = move.build(mlp)
    weight = model[0].weight
    loss = loss_of(model, 0)
    loss.backward()

    move(model, route=None)

    assert model[0].weight is weight
    assert weight.device == move.device
    assert loss.device == move.source


@with_values
def test_training_goes_on_with_the_loss_of_the_last_step_still_held(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    for each in (model, twin):
        loss = loss_of(each, 0)
        loss.backward()
        each.zero_grad()
        if each is twin:
            del loss

    move(model, route=None)
    for each in (model, twin):
        train(each, torch.optim.SGD(each.parameters(), 0.1), range(3))

    assert close(model[0].weight, twin[0].weight, **move.tolerance)


@where(lambda conversion: conversion.source == "cpu" and conversion.keeps_objects)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_spent_graph_gives_up_the_old_models_memory(move: Move, reduction: str) -> None:
    model = move.build(lambda: nn.Linear(4, 2))
    loss = getattr(model(move.inputs_before(5, 4)), reduction)()
    loss.backward()
    old = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    old += [StorageWeakRef(parameter.grad.untyped_storage()) for parameter in model.parameters()]

    move(model, route=None)

    assert [reference.expired() for reference in old] == [True] * 4
    assert loss.isfinite()


@where(lambda conversion: conversion.source == "cpu")
def test_without_a_graph_the_old_models_memory_is_free_when_the_call_returns(move: Move) -> None:
    model = move.build(mlp)
    old = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]

    move(model)

    assert all(reference.expired() for reference in old)
