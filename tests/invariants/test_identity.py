"""Promise: the Parameter objects of the model are the same objects afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.moves import Move, same
from tests.promises import where, with_same_objects, with_values
from tests.zoo import MODELS


@with_same_objects
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_objects_they_were(move: Move, name: str) -> None:
    model = move.build(MODELS[name])
    before = dict(model.named_parameters(remove_duplicate=False))

    move(model)

    after = dict(model.named_parameters(remove_duplicate=False))
    assert [key for key in before if after[key] is not before[key]] == []


@with_same_objects
@with_values
def test_a_parameter_held_outside_the_model_is_the_models_parameter(move: Move) -> None:
    layer = move.build(lambda: nn.Linear(4, 2))
    held, expected = layer.weight, move.cast(layer.weight) + 1

    move(layer)
    with torch.no_grad():
        layer.weight.add_(1)

    assert same(held, expected)


def test_parameters_are_leaves_and_parameters(move: Move) -> None:
    model = move.build(MODELS["normed"])

    move(model)

    assert [key for key, p in model.named_parameters() if not p.is_leaf or not isinstance(p, nn.Parameter)] == []


@where(lambda conversion: not conversion.keeps_objects)
def test_overwriting_gives_one_new_object_for_each_old_one(move: Move) -> None:
    model = move.build(MODELS["mlp"])
    before = {id(parameter): parameter for parameter in model.parameters()}

    move(model)

    after = list(model.parameters())
    assert len(after) == len(before)
    assert not any(id(parameter) in before for parameter in after)


@where(lambda conversion: not conversion.keeps_objects)
@with_values
def test_overwriting_leaves_the_old_objects_alone(move: Move) -> None:
    model = move.build(MODELS["mlp"])
    before = dict(model.named_parameters())
    values = {key: parameter.detach().clone() for key, parameter in before.items()}

    move(model)

    assert [key for key, parameter in before.items() if not same(parameter, values[key])] == []
