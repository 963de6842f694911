"""Promise: ParameterList, ParameterDict and nested containers keep their entries, their order and their ties."""

from __future__ import annotations

import torch
from torch import nn

from tests.moves import Move
from tests.promises import where, with_same_objects


class Listed(nn.Module):
    """Parameters in containers, one of them in two."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(3))
        self.listed = nn.ParameterList([shared, nn.Parameter(torch.zeros(2)), 7])
        self.named = nn.ParameterDict({"b": shared, "a": nn.Parameter(torch.zeros(2)), "plain": "text"})
        self.nested = nn.ModuleDict({"one": nn.ModuleList([nn.Linear(2, 2)])})


def test_every_entry_moves(move: Move) -> None:
    model = move.build(Listed)

    move(model)

    assert {parameter.device for parameter in model.parameters()} == {move.device}
    assert {parameter.dtype for parameter in model.parameters()} == {move.dtype}


def test_order_and_plain_entries_are_kept(move: Move) -> None:
    model = move.build(Listed)
    keys = list(model.named)

    move(model)

    assert list(model.named) == keys
    assert set(keys) == {"b", "a", "plain"}
    assert model.listed[2] == 7
    assert model.named["plain"] == "text"


def test_a_parameter_in_two_containers_stays_one(move: Move) -> None:
    model = move.build(Listed)

    move(model)

    assert model.listed[0] is model.named["b"]


@with_same_objects
def test_entries_are_the_objects_they_were(move: Move) -> None:
    model = move.build(Listed)
    listed, named = list(model.listed), dict(model.named.items())

    move(model)

    assert all(mine is its for mine, its in zip(model.listed, listed, strict=True))
    assert all(model.named[key] is value for key, value in named.items())


@where(lambda conversion: conversion.keeps_objects)
def test_a_plain_list_of_the_same_parameters_stays_in_step(move: Move) -> None:
    # Not registered anywhere: it holds the objects, so it sees the move.
    model = move.build(Listed)
    model.plain = [model.listed[0], model.named["a"]]

    move(model)

    assert {tensor.device for tensor in model.plain} == {move.device}
