"""Promise: a lazy parameter stays lazy, on the new device and in the new dtype, and is the object it was."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from tests.moves import Move
from tests.promises import with_same_objects, with_values


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2))


def test_a_lazy_parameter_stays_lazy(move: Move) -> None:
    model = move.build(lazy)

    move(model, route=None)

    assert is_lazy(model[0].weight)
    assert isinstance(model[0].weight, UninitializedParameter)
    assert isinstance(model[1].running_mean, UninitializedBuffer)


@with_same_objects
def test_a_lazy_parameter_is_the_object_it_was(move: Move) -> None:
    model = move.build(lazy)
    weight = model[0].weight
    weight.owner = "me"

    move(model, route=None)

    assert model[0].weight is weight
    assert model[0].weight.owner == "me"


@with_values
def test_a_lazy_parameter_materialises_where_it_was_moved_to(move: Move) -> None:
    # pytorch/xla#9189
    model = move.build(lazy)

    move(model, route=None)
    model(move.inputs(5, 4))

    assert {parameter.device for parameter in model.parameters()} == {move.device}
    assert {parameter.dtype for parameter in model.parameters()} == {move.dtype}
    assert model[1].running_mean.device == move.device
    assert model[0].weight.shape == (3, 4)


@with_values
@with_same_objects
def test_an_optimizer_built_on_lazy_parameters_updates_the_real_ones(move: Move) -> None:
    model = move.build(lazy)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    move(model, optimizer, route=None)
    model(move.inputs(5, 4)).square().sum().backward()
    before = model[0].weight.detach().cpu().clone()
    optimizer.step()

    assert not torch.equal(model[0].weight.detach().cpu(), before)


def test_tied_lazy_parameters_stay_tied(move: Move) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))
        model[1].weight = model[0].weight
        return model

    model = move.build(make)

    move(model, route=None)

    assert model[1].weight is model[0].weight
    assert is_lazy(model[1].weight)


def test_an_initialised_neighbour_of_a_lazy_layer_moves(move: Move) -> None:
    model = move.build(lazy)

    move(model, route=None)

    assert (model[2].weight.device, model[2].weight.dtype) == (move.device, move.dtype)
