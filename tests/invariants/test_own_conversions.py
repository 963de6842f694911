"""Promise: a parameter class that converts itself is asked, and what it returns wins, attributes and all."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from tests.moves import Move, close
from tests.promises import with_same_objects, with_values
from tests.zoo import mlp


class Quantised(nn.Parameter):
    """Carries a scale that has to move with it, as quantised parameters do: ``.to`` is overridden, and so is ``.cuda``."""

    scale: Tensor

    def __new__(cls, data: Tensor, scale: Tensor | None = None, requires_grad: bool = False) -> Self:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.scale = scale if scale is not None else torch.ones((), device=data.device)
        made.conversions = 0
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, _dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        target = self.device if device is None else device
        made = Quantised(self.data.to(target), self.scale.to(target))
        made.conversions = self.conversions + 1
        return made


class Int8Layer(nn.Module):
    """Integer weights with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Quantised(torch.arange(-4, 4, dtype=torch.int8).reshape(2, 4), torch.tensor(0.5))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.device).data.to(x.dtype) * self.weight.scale.to(x.dtype)).t() + self.bias


def test_what_it_carries_moves_with_it(move: Move) -> None:
    model = nn.Sequential(move.build(mlp), move.build(Int8Layer))

    move(model, route=None)

    weight = model[1].weight
    assert type(weight) is Quantised
    assert (weight.device, weight.scale.device) == (move.device, move.device)
    assert weight.dtype is torch.int8


def test_it_is_asked_once_for_each_conversion(move: Move) -> None:
    model = move.build(Int8Layer)

    move(model, route=None)

    assert model.weight.conversions == len(move.conversion.hops)


@with_same_objects
def test_it_is_the_object_it_was(move: Move) -> None:
    model = move.build(Int8Layer)
    weight = model.weight

    move(model, route=None)

    assert model.weight is weight


@with_values
def test_it_keeps_its_values(move: Move) -> None:
    with torch.device(move.source):
        model = Int8Layer()

    move(model, route=None)

    assert close(model.weight.data, torch.arange(-4, 4, dtype=torch.int8).reshape(2, 4))
    assert close(model.weight.scale, torch.tensor(0.5))


@with_values
def test_it_computes_after_the_move(move: Move) -> None:
    with torch.device(move.source):
        model = Int8Layer()

    move(model, route=None)

    assert close(model(move.ones(1, 4)), torch.tensor([[-5.0, 3.0]]))
