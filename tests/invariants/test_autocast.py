"""Promise: a forward pass under autocast, before or around the move, changes nothing.

Autocast caches its casts by weak pointers to the parameters, which a swap has to clear and a stale cast must not survive.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.moves import Move, close
from tests.promises import with_same_objects, with_values
from tests.zoo import mlp

SUPPORTED = ("cpu", "cuda", "xla")


def autocast(device: torch.device) -> torch.autocast:
    if device.type not in SUPPORTED:
        pytest.skip(f"not applicable: torch has no autocast for {device.type}")
    return torch.autocast(device.type, torch.bfloat16)


def test_a_forward_under_autocast_before_the_move_does_not_stop_it(move: Move) -> None:
    model = move.build(mlp)
    with autocast(move.source):
        model(move.inputs_before(5, 4))

    move(model)

    assert model[0].weight.device == move.device


@with_same_objects
def test_a_move_inside_autocast_keeps_the_objects(move: Move) -> None:
    model = move.build(mlp)
    weight = model[0].weight
    with autocast(move.source):
        model(move.inputs_before(5, 4)).sum()

        move(model)

    assert model[0].weight is weight
    assert weight.device == move.device
    assert weight.dtype == move.dtype


@with_values
def test_a_forward_under_autocast_after_the_move_uses_the_new_weights(move: Move) -> None:
    model = move.build(mlp)
    with autocast(move.source), autocast(move.device):
        model(move.inputs_before(5, 4))

        move(model, route=None)
        with torch.no_grad():
            model[2].weight.zero_()
            model[2].bias.fill_(2)
        output = model(move.inputs(5, 4))

    assert close(output, torch.full((5, 2), 2.0))


@with_values
def test_training_goes_on_under_autocast(move: Move) -> None:
    model = move.build(lambda: nn.Linear(4, 2))
    with autocast(move.source):
        model(move.inputs_before(5, 4)).sum().backward()
    model.zero_grad()

    move(model)
    with autocast(move.device):
        loss = model(move.inputs(5, 4)).sum()
    loss.backward()

    assert close(model.bias.grad, torch.full((2,), 5.0))
    assert model.bias.grad.device == move.device
