"""Promise: one tensor under several names is one tensor afterwards, whichever names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.moves import Move, close, named_tensors, same
from tests.promises import with_values
from tests.zoo import Tied, TwoPaths, fill, train


def groups(model: nn.Module) -> list[list[str]]:
    """The names of the model's tensors, grouped by object."""
    found: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(id(tensor), []).append(name)
    return list(found.values())


def test_a_matrix_tied_across_modules_stays_one_matrix(move: Move) -> None:
    model = move.build(Tied)

    move(model)

    assert model.decoder.weight is model.encoder.weight


def test_a_matrix_under_two_names_of_one_module_stays_one_matrix(move: Move) -> None:
    model = move.build(Tied)

    move(model)

    assert model.decoder.again is model.decoder.weight


def test_a_buffer_tied_across_modules_stays_one_buffer(move: Move) -> None:
    # Stock torch converts every buffer slot by itself.
    model = move.build(Tied)

    move(model)

    assert model.decoder.mask is model.encoder.mask


def test_a_buffer_under_two_names_of_one_module_stays_one_buffer(move: Move) -> None:
    model = move.build(Tied)

    move(model)

    assert model.encoder.mask_again is model.encoder.mask


def test_every_group_of_names_is_the_group_it_was(move: Move) -> None:
    model = move.build(Tied)
    before = groups(model)

    move(model)

    assert groups(model) == before


def test_a_parameter_that_is_a_buffer_elsewhere_stays_the_same_tensor(move: Move) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[1].register_buffer("teacher", model[0].weight)
        return model

    model = move.build(make)

    move(model)

    assert model[1].teacher is model[0].weight


def test_the_number_of_parameters_is_what_it_was(move: Move) -> None:
    model = move.build(Tied)
    before = len(list(model.parameters()))

    move(model)

    assert len(list(model.parameters())) == before


def test_a_sub_module_at_two_paths_stays_one(move: Move) -> None:
    model = move.build(TwoPaths)
    before = groups(model)

    move(model)

    assert model.same is model.inner
    assert groups(model) == before


@with_values
def test_a_change_through_one_name_is_seen_through_the_other(move: Move) -> None:
    model = move.build(Tied)

    move(model)
    with torch.no_grad():
        model.encoder.weight.fill_(3)
        model.encoder.mask.fill_(5)

    assert same(model.decoder.weight, torch.full((4, 4), 3.0, dtype=move.dtype))
    assert same(model.decoder.mask, torch.full((4,), 5.0, dtype=move.dtype))


@with_values
def test_tied_weights_train_as_one(move: Move) -> None:
    # The gradient of a tied matrix is a sum over its uses: a model that came apart gets other numbers.
    model, twin = move.build(Tied), fill(Tied())
    train(twin, torch.optim.SGD(twin.parameters(), 0.1), range(3))

    move(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(3))

    assert close(model.decoder.weight, twin.decoder.weight, **move.tolerance)
    assert model.decoder.weight is model.encoder.weight


@with_values
def test_a_function_of_the_users_runs_once_for_each_tensor(move: Move) -> None:
    # Stock torch calls it for every name: a tied matrix comes out multiplied by eight.
    model = move.build(Tied)
    expected = move.cast(model.encoder.weight) * 2

    move.apply(model, lambda tensor: tensor.to(device=move.device, dtype=move.dtype) * 2)

    assert close(model.encoder.weight, expected, **move.tolerance)
    assert model.decoder.again is model.encoder.weight


def test_a_tie_to_a_part_that_was_not_asked_to_move_stays(move: Move) -> None:
    if not move.conversion.keeps_objects:
        pytest.skip("not applicable: the other part keeps the old object")
    model = move.build(Tied)

    move(model.encoder)

    assert model.decoder.weight is model.encoder.weight
    assert model.decoder.weight.device == move.device
    assert model.last.weight.device == move.source
