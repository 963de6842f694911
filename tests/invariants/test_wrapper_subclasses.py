"""Promise: parameters that keep their data in inner tensors move as a whole, or are refused by name."""

from __future__ import annotations

import weakref
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.moves import Move, close, host
from tests.promises import where, with_values

# An inner tensor keeps its dtype unless its class says otherwise, so a conversion of the dtype is its class's own affair.
pytestmark = where(lambda conversion: not conversion.keeps_device or conversion.name == "float64")


class TwoParts(Tensor):
    """A number kept as a sum of two tensors. Operations work on the sum; conversions on the parts."""

    _high: Tensor
    _low: Tensor

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls, high.shape, dtype=high.dtype, device=high.device, requires_grad=high.requires_grad
        )

    def __init__(self, high: Tensor, low: Tensor) -> None:
        self._high, self._low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_high", "_low"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> TwoParts:
        return cls(inner["_high"], inner["_low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket
        aten = torch.ops.aten
        if name in (aten._to_copy, aten.detach, aten.clone, aten.empty_like):
            one = args[0]
            if name is aten.empty_like:
                return func(one._high, *args[1:], **kwargs)
            return cls(func(one._high, *args[1:], **kwargs), func(one._low, *args[1:], **kwargs))
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda t: t._high + t._low, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


def model(move: Move) -> nn.Module:
    with torch.device(move.source):
        layer = nn.Linear(4, 2)
        high, low = torch.arange(8.0).reshape(2, 4), torch.full((2, 4), 0.5)
        layer.weight = nn.Parameter(TwoParts(high, low))
    return layer


def test_its_parts_move_with_it(move: Move) -> None:
    layer = model(move)

    move(layer, route=None)

    weight = layer.weight
    assert {each.device for each in (weight, weight._high, weight._low)} == {move.device}
    assert {each.dtype for each in (weight, weight._high, weight._low)} == {move.dtype}


def test_it_keeps_its_class_and_is_the_object_it_was(move: Move) -> None:
    layer = model(move)
    weight = layer.weight

    move(layer, route=None)

    assert layer.weight is weight
    assert type(layer.weight) is TwoParts
    assert isinstance(layer.weight, nn.Parameter)


def test_its_attributes_are_carried(move: Move) -> None:
    layer = model(move)
    layer.weight.owner = "me"

    move(layer, route=None)

    assert layer.weight.owner == "me"


@with_values
def test_its_values_are_kept(move: Move) -> None:
    layer = model(move)

    move(layer, route=None)

    assert close(layer.weight._high, torch.arange(8.0).reshape(2, 4))
    assert close(layer.weight._low, torch.full((2, 4), 0.5))


@with_values
def test_it_works_and_gets_a_gradient_afterwards(move: Move) -> None:
    layer = model(move)

    move(layer, route=None)
    output = layer(move.ones(3, 4))
    output.sum().backward()

    assert output.device == move.device
    assert layer.weight.grad.device == move.device
    assert close(host(layer.weight.grad), torch.full((2, 4), 3.0))


def test_a_tie_of_two_such_parameters_stays(move: Move) -> None:
    layer = model(move)
    layer.again = nn.Linear(4, 2, device=move.source)
    layer.again.weight = layer.weight

    move(layer, route=None)

    assert layer.again.weight is layer.weight


def test_with_a_live_graph_it_is_refused_by_name(move: Move) -> None:
    layer = model(move)
    graph = layer(torch.ones(3, 4, device=move.source)).sum()

    with move.refuses("weight"):
        move(layer)

    assert graph.requires_grad


def test_with_a_weak_reference_it_is_refused_by_name(move: Move) -> None:
    layer = model(move)
    reference = weakref.ref(layer.weight)

    with move.refuses("weight"):
        move(layer)

    assert reference() is layer.weight


def test_once_the_graph_is_gone_it_moves(move: Move) -> None:
    layer = model(move)
    graph = layer(torch.ones(3, 4, device=move.source)).sum()
    with pytest.raises(Exception):  # noqa: B017, PT011 - what is raised is the tests' above
        move(layer)
    move.failed = None
    del graph

    move(layer, route=None)

    assert layer.weight._high.device == move.device
