"""Promise: what Python code hung on a tensor is still there: attributes, class, slots, init arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.moves import Move, same
from tests.promises import with_values
from tests.zoo import Labelled, mlp


class Marked(Tensor):
    """A plain tensor subclass for buffers."""


def labelled() -> nn.Module:
    model = mlp()
    model[0].weight = Labelled(model[0].weight.detach(), "first")
    return model


def test_a_plain_attribute_of_a_parameter_is_kept(move: Move) -> None:
    model = move.build(mlp)
    owner = object()
    model[0].weight.owner = owner

    move(model)

    assert model[0].weight.owner is owner


def test_a_plain_attribute_of_a_buffer_is_kept(move: Move) -> None:
    model = move.build(mlp)
    model.register_buffer("table", torch.ones(3, device=move.source))
    model.table.owner = "the table"

    move(model)

    assert model.table.device == move.device
    assert model.table.owner == "the table"


def test_the_class_of_a_parameter_is_kept(move: Move) -> None:
    model = move.build(labelled)

    move(model)

    assert type(model[0].weight) is Labelled


def test_slots_and_attributes_of_a_parameter_class_are_kept(move: Move) -> None:
    model = move.build(labelled)

    move(model)

    assert (model[0].weight.label, model[0].weight.colour) == ("first", "colour of first")


def test_a_labelled_parameter_moves_and_trains_like_any_other(move: Move) -> None:
    model = move.build(labelled)

    move(model)
    model(move.inputs(5, 4)).sum().backward()

    assert model[0].weight.grad.device == move.device
    assert model[0].weight.grad.dtype == move.dtype


def test_the_class_of_a_buffer_is_kept(move: Move) -> None:
    model = move.build(mlp)
    model.register_buffer("table", torch.ones(3, device=move.source).as_subclass(Marked))

    move(model)

    assert type(model.table) is Marked
    assert model.table.device == move.device


@with_values
def test_a_buffer_of_a_class_of_its_own_keeps_its_value(move: Move) -> None:
    model = move.build(mlp)
    model.register_buffer("table", torch.arange(3.0, device=move.source).as_subclass(Marked))

    move(model)

    assert same(model.table.as_subclass(Tensor), torch.arange(3.0, dtype=move.dtype))


def test_nn_buffer_stays_an_nn_buffer(move: Move) -> None:
    model = move.build(mlp)
    model.table = nn.Buffer(torch.ones(3, device=move.source), persistent=False)

    move(model)

    assert isinstance(model.table, nn.Buffer)
    assert not model.table.persistent
    assert "table" not in model.state_dict()


def test_attributes_that_are_tensors_of_the_model_stay_ties(move: Move) -> None:
    # Some libraries hang a sibling on a parameter. The attribute is the object that the module holds, before and after.
    model = move.build(mlp)
    model[0].weight.partner = model[2].weight

    move(model)

    if move.conversion.keeps_objects:
        assert model[0].weight.partner is model[2].weight
    assert model[0].weight.partner.shape == (2, 3)
