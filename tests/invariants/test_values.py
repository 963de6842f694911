"""Promise: every parameter and buffer arrives with its value, its dtype and its place in the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.moves import Move, close, named_tensors, same
from tests.promises import where, with_values
from tests.zoo import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_on_the_target_device(move: Move, name: str) -> None:
    model = move.build(MODELS[name])

    move(model)

    assert {tensor.device for _, tensor in named_tensors(model)} == {move.device}


@with_values
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_keeps_its_value(move: Move, name: str) -> None:
    model = move.build(MODELS[name])
    expected = move.expected(model)

    move(model)

    assert [key for key, tensor in named_tensors(model) if not same(tensor, expected[key])] == []


@pytest.mark.parametrize("name", MODELS)
def test_floating_tensors_take_the_dtype_and_integer_ones_keep_theirs(move: Move, name: str) -> None:
    model = move.build(MODELS[name])
    wanted = {key: move.dtype if t.is_floating_point() else t.dtype for key, t in named_tensors(model)}

    move(model)

    assert {key: tensor.dtype for key, tensor in named_tensors(model)} == wanted


@with_values
@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_what_it_was(move: Move, name: str) -> None:
    model = move.build(MODELS[name]).eval()
    expected = model(move.inputs_before(5, 4)).detach()

    move(model)

    assert close(model(move.inputs(5, 4)), expected, **move.tolerance)


def test_shapes_are_what_they_were(move: Move) -> None:
    model = move.build(MODELS["normed"])
    shapes = {key: tensor.shape for key, tensor in named_tensors(model)}

    move(model)

    assert {key: tensor.shape for key, tensor in named_tensors(model)} == shapes


@with_values
def test_a_tensor_and_its_source_share_no_memory(move: Move) -> None:
    layer = move.build(lambda: nn.Linear(4, 3))
    held = layer.weight.detach()
    before = move.cast(held)

    move(layer, route=None)
    with torch.no_grad():
        layer.weight.add_(1)

    assert same(move.cast(held), before)


@where(lambda conversion: conversion.source == "cpu" and conversion.has_values and not conversion.keeps_device)
def test_values_survive_that_the_source_is_overwritten_at_once(move: Move) -> None:
    layer = move.build(lambda: nn.Linear(4, 3))
    source, expected = layer.weight.detach(), move.cast(layer.weight)

    move(layer)
    source.zero_()

    assert same(layer.weight, expected)
