"""Promise: an RNN's flat weights, a second list of the same parameters, stay the parameters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.moves import Move, close
from tests.promises import with_values
from tests.zoo import Recurrent, fill, train

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_flat_weights_are_the_parameters(move: Move, kind: str) -> None:
    model = move.build(partial(Recurrent, KINDS[kind]))

    move(model)

    names = model.rnn._flat_weights_names
    assert all(model.rnn._flat_weights[i] is getattr(model.rnn, name) for i, name in enumerate(names))


@every_kind
def test_the_rnn_is_where_the_rest_of_the_model_is(move: Move, kind: str) -> None:
    model = move.build(partial(Recurrent, KINDS[kind]))

    move(model)

    assert {parameter.device for parameter in model.parameters()} == {move.device}
    assert {weight.device for weight in model.rnn._flat_weights} == {move.device}


@with_values
def test_an_rnn_trains_on(move: Move) -> None:
    model, twin = move.build(Recurrent), fill(Recurrent())
    train(twin, torch.optim.SGD(twin.parameters(), 0.1), range(2))

    move(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(2))

    assert close(model.rnn.weight_hh_l0, twin.rnn.weight_hh_l0, **move.tolerance)


def test_an_rnn_that_is_the_whole_model_moves(move: Move) -> None:
    rnn = move.build(lambda: nn.LSTM(4, 3))

    move(rnn)

    assert rnn._flat_weights[0] is rnn.weight_ih_l0
    assert rnn.weight_ih_l0.device == move.device


def test_a_parameter_tied_to_an_rnn_stays_tied(move: Move) -> None:
    def make() -> nn.Module:
        model = Recurrent()
        model.shadow = nn.Linear(4, 12, bias=False)
        model.shadow.weight = model.rnn.weight_ih_l0
        return model

    model = move.build(make)

    move(model)

    assert model.shadow.weight is model.rnn.weight_ih_l0
    assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0
