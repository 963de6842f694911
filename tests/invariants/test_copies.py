"""Promise: a moved model can be copied, pickled, saved and loaded like any other, also where its device is missing."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.moves import Move, close, named_tensors, same
from tests.promises import where, with_values
from tests.zoo import Labelled, Recurrent, Tied, fill, loss_of, mlp, train


def test_a_deepcopy_is_independent_and_tied(move: Move) -> None:
    model = move.build(Tied)

    move(model)
    twin = copy.deepcopy(model)

    assert twin.encoder.weight is not model.encoder.weight
    assert twin.decoder.weight is twin.encoder.weight
    assert twin.decoder.mask is twin.encoder.mask
    assert {tensor.device for _, tensor in named_tensors(twin)} == {move.device}


@with_values
def test_a_deepcopy_trains_by_itself(move: Move) -> None:
    model = move.build(Tied)

    move(model)
    expected = move.expected(model)
    twin = copy.deepcopy(model)
    train(twin, torch.optim.SGD(twin.parameters(), 0.1), range(1))

    wanted = {key: tensor.to(move.dtype) if tensor.is_floating_point() else tensor for key, tensor in expected.items()}
    assert [key for key, tensor in named_tensors(model) if not same(tensor, wanted[key])] == []
    assert not close(twin.encoder.weight, model.encoder.weight)


def test_a_deepcopy_with_hooks_and_gradients_works(move: Move) -> None:
    model = move.build(mlp)
    model[0].weight.register_hook(lambda grad: None)
    model(move.inputs_before(5, 4)).sum().backward()

    move(model)
    twin = copy.deepcopy(model)
    twin(move.inputs(5, 4)).sum().backward()

    assert twin[0].weight.grad.device == move.device
    assert twin[0].weight.grad is not model[0].weight.grad


def test_a_recurrent_model_can_be_copied(move: Move) -> None:
    model = move.build(Recurrent)

    move(model)
    twin = copy.deepcopy(model)

    assert twin.rnn._flat_weights[0] is twin.rnn.weight_ih_l0


@with_values
def test_a_pickle_of_the_model_comes_back(move: Move) -> None:
    model = move.build(Tied)

    move(model)
    twin = pickle.loads(pickle.dumps(model))

    assert twin.decoder.weight is twin.encoder.weight
    assert same(twin.encoder.weight, model.encoder.weight)
    assert twin.encoder.weight.device == move.device


@with_values
def test_a_saved_checkpoint_comes_back(move: Move) -> None:
    model = move.build(Tied)
    file = io.BytesIO()

    move(model)
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)

    fresh = Tied().to(move.dtype)
    fresh.load_state_dict(loaded)
    assert same(fresh.encoder.weight, model.encoder.weight)


@with_values
def test_a_saved_model_comes_back_on_the_host(move: Move) -> None:
    model = move.build(Tied)
    file = io.BytesIO()

    move(model)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=False)

    assert same(loaded.encoder.weight, model.encoder.weight)
    assert loaded.decoder.weight is loaded.encoder.weight
    assert loaded.encoder.weight.device.type == "cpu"


def test_a_deepcopy_from_before_is_not_affected(move: Move) -> None:
    model = move.build(Tied)
    twin = copy.deepcopy(model)
    before = {key: (id(tensor), tensor.device, tensor.dtype) for key, tensor in named_tensors(twin)}

    move(model)

    assert {key: (id(tensor), tensor.device, tensor.dtype) for key, tensor in named_tensors(twin)} == before


@with_values
def test_a_state_dict_from_before_is_a_snapshot_with_its_own_values(move: Move) -> None:
    model = move.build(mlp)
    snapshot = model.state_dict()
    expected = {key: tensor.detach().cpu().clone() for key, tensor in snapshot.items()}

    move(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(1))

    assert [key for key, tensor in snapshot.items() if not same(tensor, expected[key])] == []


def test_a_labelled_parameter_can_be_copied_afterwards(move: Move) -> None:
    def make() -> nn.Module:
        model = mlp()
        model[0].weight = Labelled(model[0].weight.detach(), "first")
        return model

    model = move.build(make)

    move(model)

    assert model[0].weight.label == "first"
    assert copy.copy(model)[0].weight is model[0].weight


def test_a_deepcopy_of_a_model_with_an_old_graph_works(move: Move) -> None:
    if not move.conversion.keeps_objects:
        pytest.skip("not applicable: the graph holds other objects")
    model = move.build(mlp)
    loss = loss_of(model, 0)

    move(model, route=None)
    twin = copy.deepcopy(model)

    assert twin[0].weight.device == move.device
    assert loss.requires_grad


LOAD = """
import sys
sys.modules["torch_xla"] = None
import torch
state = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
assert {tensor.device.type for tensor in state.values()} == {"cpu"}, state
print(float(sum(tensor.double().sum() for tensor in state.values())))
"""


@pytest.mark.timeout(180)
@with_values
@where(lambda conversion: conversion.device.type == "xla")
def test_a_checkpoint_of_a_moved_model_loads_without_the_device(move: Move, tmp_path: Path) -> None:
    model, path = move.build(mlp), tmp_path / "checkpoint.pt"

    move(model)
    torch.save(model.state_dict(), path)
    child = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, timeout=150, check=False
    )

    assert child.returncode == 0, child.stderr
    total = sum(
        float(tensor.detach().cpu().double().sum()) for tensor in fill(mlp()).to(move.dtype).state_dict().values()
    )
    assert float(child.stdout) == pytest.approx(total, rel=1e-2)
