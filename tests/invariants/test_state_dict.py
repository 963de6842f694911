"""Promise: ``state_dict`` has the keys it had, in the order it had, and buffers outside it move all the same."""

from __future__ import annotations

import pytest

from tests.moves import Move, same
from tests.promises import with_values
from tests.zoo import MODELS, Normed


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_order_are_what_they_were(move: Move, name: str) -> None:
    model = move.build(MODELS[name])
    keys = list(model.state_dict())

    move(model)

    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_parameters_is_what_it_was(move: Move, name: str) -> None:
    # An optimizer's checkpoint is keyed by this order and nothing else.
    model = move.build(MODELS[name])
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    move(model)

    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names


@with_values
def test_a_checkpoint_from_before_loads_strictly(move: Move) -> None:
    model, other = move.build(Normed), move.build(Normed, seed=5)
    checkpoint, expected = other.state_dict(), move.expected(other)

    move(model)
    outcome = model.load_state_dict(checkpoint, strict=True)

    assert (outcome.missing_keys, outcome.unexpected_keys) == ([], [])
    assert same(model.first.weight, expected["first.weight"])


def test_a_non_persistent_buffer_moves_and_stays_out_of_the_checkpoint(move: Move) -> None:
    model = move.build(Normed)

    move(model)

    assert (model.table.device, model.table.dtype) == (move.device, move.dtype)
    assert "table" not in model.state_dict()


def test_empty_slots_stay_empty(move: Move) -> None:
    model = move.build(Normed)

    move(model)

    assert model.absent is None
    assert model.last.scale is None
