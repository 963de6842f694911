"""Promise: tensors made under inference mode, tensors in shared memory, and pinned or mapped ones move like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.moves import Move, close, named_tensors, same
from tests.promises import from_host, where, with_values
from tests.zoo import fill, mlp, train


@where(lambda conversion: conversion.keeps_objects)
def test_inference_tensors_move(move: Move) -> None:
    with torch.inference_mode():
        model = move.build(mlp)
    before = dict(named_tensors(model))

    move(model, route=None)

    assert {tensor.device for _, tensor in named_tensors(model)} == {move.device}
    assert {tensor.dtype for _, tensor in named_tensors(model)} == {move.dtype}
    assert [key for key, tensor in named_tensors(model) if tensor is not before[key]] == []


@with_values
def test_inference_tensors_keep_their_values(move: Move) -> None:
    with torch.inference_mode():
        model = move.build(mlp)
        expected = move.expected(model)

    move(model, route=None)

    with torch.inference_mode():
        assert [key for key, tensor in named_tensors(model) if not same(tensor, expected[key])] == []


@with_values
@where(lambda conversion: conversion.keeps_device and conversion.source == "cpu")
def test_a_model_made_under_inference_mode_still_runs(move: Move) -> None:
    # torch's own assignment to .data leaves a tensor that counts no versions, and the next forward fails on it.
    with torch.inference_mode():
        model = move.build(mlp)

    move(model, route=None)

    with torch.inference_mode():
        assert model(torch.ones(5, 4, dtype=move.dtype)).isfinite().all()


def test_a_model_moves_inside_inference_mode(move: Move) -> None:
    model = move.build(mlp)

    with torch.inference_mode():
        move(model, route=None)

    assert {parameter.device for parameter in model.parameters()} == {move.device}


@with_values
def test_a_model_that_was_moved_inside_inference_mode_can_train(move: Move) -> None:
    # Stock torch leaves inference tensors behind, which no graph can save.
    model, twin = move.build(mlp), fill(mlp())
    train(twin, torch.optim.SGD(twin.parameters(), 0.1), range(2))

    with torch.inference_mode():
        move(model, route=None)
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(2))

    assert close(model[0].weight, twin[0].weight, **move.tolerance)


@from_host
@with_values
def test_shared_memory_moves_and_the_shared_copy_stays(move: Move) -> None:
    model = move.build(mlp).share_memory()
    held, expected = model[0].weight.detach(), move.cast(model[0].weight)

    move(model, route=None)
    with torch.no_grad():
        model[0].weight.zero_()

    assert close(held, expected, **move.tolerance)
    assert held.is_shared()


@from_host
@with_values
def test_a_model_mapped_from_a_file_moves_and_leaves_the_file_alone(move: Move, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    np.arange(8, dtype=np.float32).tofile(path)
    layer = nn.Linear(4, 2, bias=False)
    layer.weight = nn.Parameter(torch.from_file(str(path), shared=True, size=8).view(2, 4))

    move(layer, route=None)
    with torch.no_grad():
        layer.weight.zero_()

    assert np.fromfile(path, dtype=np.float32).tolist() == list(range(8))


@from_host
@with_values
def test_a_numpy_array_under_a_parameter_is_left_alone(move: Move) -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    layer = nn.Linear(4, 2, bias=False)
    layer.weight = nn.Parameter(torch.from_numpy(array))
    expected = move.cast(layer.weight)

    move(layer, route=None)
    assert same(layer.weight, expected)
    with torch.no_grad():
        layer.weight.zero_()

    assert array.tolist() == np.arange(8).reshape(2, 4).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs CUDA")
def test_pinned_memory_moves(move: Move) -> None:
    if move.source.type != "cpu":
        pytest.skip("not applicable: only host memory is pinned")
    layer = nn.Linear(4, 2)
    layer.weight = nn.Parameter(layer.weight.detach().pin_memory())
    expected = move.cast(layer.weight)

    move(layer)

    assert same(layer.weight, expected)
