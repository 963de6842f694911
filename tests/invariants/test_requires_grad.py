"""Promise: what was trainable is trainable, what was frozen is frozen, and buffers are no exception."""

from __future__ import annotations

import torch
from torch import nn

from tests.moves import Move, close, named_tensors
from tests.promises import with_same_objects, with_values
from tests.zoo import Normed, loss_of


class Scaled(nn.Module):
    """A buffer that requires a gradient: state that is trained but kept out of ``parameters()``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2).requires_grad_())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def test_requires_grad_is_what_it_was(move: Move) -> None:
    model = move.build(Normed)
    model.first.weight.requires_grad_(False)
    before = {key: tensor.requires_grad for key, tensor in named_tensors(model)}

    move(model)

    assert {key: tensor.requires_grad for key, tensor in named_tensors(model)} == before


def test_a_buffer_that_requires_a_gradient_stays_a_leaf(move: Move) -> None:
    model = move.build(Scaled)

    move(model)

    assert model.scale.requires_grad
    assert model.scale.is_leaf
    assert model.scale.device == move.device


@with_values
def test_a_buffer_that_requires_a_gradient_gets_one(move: Move) -> None:
    model = move.build(Scaled)

    move(model)
    loss_of(model, 0).backward()

    assert model.scale.grad is not None
    assert model.scale.grad.device == move.device


@with_same_objects
def test_a_buffer_that_requires_a_gradient_is_the_object_it_was(move: Move) -> None:
    model = move.build(Scaled)
    before = model.scale

    move(model)

    assert model.scale is before


@with_values
def test_an_optimizer_of_a_trainable_buffer_follows(move: Move) -> None:
    model = move.build(Scaled)
    optimizer = torch.optim.SGD([model.scale], 0.1, momentum=0.9)
    model.scale.grad = torch.ones_like(model.scale)
    optimizer.step()

    move(model, optimizer)
    model.scale.grad = torch.ones_like(model.scale)
    optimizer.step()

    (state,) = optimizer.state.values()
    assert (state["momentum_buffer"].device, state["momentum_buffer"].dtype) == (move.device, move.dtype)
    assert close(state["momentum_buffer"], torch.full((2,), 1.9), **move.tolerance)


def test_the_gradient_of_a_buffer_is_carried(move: Move) -> None:
    model = move.build(Scaled)
    loss_of(model, 0).backward()

    move(model)

    assert (model.scale.grad.device, model.scale.grad.dtype) == (move.device, move.dtype)
