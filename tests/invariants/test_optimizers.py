"""Promise: an optimizer built before the move goes on as if nothing had happened, momentum and all.

Each optimizer takes three steps before and three after, with another batch each time, and every tensor of its state is
compared with that of a twin that was never moved. In bfloat16 a twin in float32 would say little; there the reference
is torch's own: a new model and a new optimizer in bfloat16, loaded from the checkpoints that were taken at the move.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.moves import Move, close, host
from tests.promises import where, with_values
from tests.zoo import OPTIMIZERS, fill, loss_of, mlp, state_of, train, trained_by

pytestmark = with_values
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def built(move: Move, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if name == "sparse-adam" and not {"xla", "acme"}.isdisjoint((move.source.type, move.device.type)):
        pytest.skip("not applicable: the device has no sparse tensors")
    if name.endswith("-fused") and move.source.type == "xla":
        pytest.skip("not applicable: XLA has no fused kernels to begin with")
    model = move.build(trained_by(name))
    try:
        return model, OPTIMIZERS[name](list(model.parameters()))
    except RuntimeError as error:
        pytest.skip(f"not applicable: {error}")


def twin_of(name: str, steps: range) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fill(trained_by(name)())
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, steps)
    return model, optimizer


@where(lambda conversion: conversion.dtype is not torch.bfloat16)
@every_optimizer
def test_training_goes_on_as_if_never_moved(move: Move, name: str) -> None:
    model, optimizer = built(move, name)
    twin, reference = twin_of(name, range(6))
    train(model, optimizer, range(3))

    move(model, optimizer, route=None)
    train(model, optimizer, range(3, 6))

    tolerance = {"rtol": 2e-3, "atol": 2e-4} if name in ("lbfgs", "muon") else {"rtol": 1e-4, "atol": 1e-5}
    if name == "muon" and {move.source.type, move.device.type} != {"cpu"}:
        # It orthogonalises in bfloat16, by each device's own kernels: 2**-8 of a step of 0.02 for each of six steps. A
        # momentum that was lost would show in the second decimal.
        tolerance["atol"] = 2e-3
    for key, parameter in twin.named_parameters():
        assert close(model.get_parameter(key), parameter, **tolerance), key
    state, wanted = state_of(optimizer), state_of(reference)
    assert state.keys() == wanted.keys()
    assert [key for key in wanted if not close(state[key], wanted[key], **tolerance)] == []


@where(lambda conversion: conversion.dtype is torch.bfloat16)
@every_optimizer
def test_training_goes_on_as_from_torchs_own_checkpoint(move: Move, name: str) -> None:
    model, optimizer = built(move, name)
    train(model, optimizer, range(3))
    other = move.build(trained_by(name), seed=9).to(move.dtype)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    reference = OPTIMIZERS[name](list(other.parameters()))
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    move(model, optimizer, route=None)
    train(model, optimizer, range(3, 6))
    train(other, reference, range(3, 6))

    for key, parameter in other.named_parameters():
        assert close(model.get_parameter(key), parameter, rtol=1e-3, atol=1e-4), key
    state, wanted = state_of(optimizer), state_of(reference)
    assert {key: tensor.dtype for key, tensor in state.items()} == {key: t.dtype for key, t in wanted.items()}
    assert [key for key in wanted if not close(state[key], wanted[key], rtol=1e-2, atol=1e-3)] == []


@every_optimizer
def test_state_is_where_its_parameter_is(move: Move, name: str) -> None:
    model, optimizer = built(move, name)
    train(model, optimizer, range(2))
    before = state_of(optimizer)
    beside = {key for key, tensor in before.items() if tensor.device == move.source and tensor.dim() > 0}

    move(model, optimizer, route=None)
    train(model, optimizer, range(2, 3))

    after = state_of(optimizer)
    wanted = (move.device, move.dtype)
    assert {key: (after[key].device, after[key].dtype) for key in beside if key in after} == {
        key: wanted if before[key].is_floating_point() else (move.device, before[key].dtype)
        for key in beside
        if key in after
    }


def test_the_groups_hold_the_models_parameters(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, range(1))

    move(model, optimizer, route=None)
    train(model, optimizer, range(1, 2))

    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(mine is its for mine, its in zip(held, model.parameters(), strict=True))


def test_state_has_no_entry_for_a_tensor_that_the_model_does_not_hold(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, range(1))

    move(model, optimizer, route=None)
    train(model, optimizer, range(1, 2))

    assert {id(key) for key in optimizer.state} == {id(parameter) for parameter in model.parameters()}


def test_the_step_count_goes_on(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    train(model, optimizer, range(3))

    move(model, optimizer, route=None)
    train(model, optimizer, range(3, 5))

    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


def test_the_step_counts_place_is_torchs_choice(move: Move) -> None:
    # On the host unless the group is capturable or fused; a step count on an XLA device makes every step slower.
    model = move.build(mlp)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    train(model, optimizer, range(2))
    before = {state["step"].device for state in optimizer.state.values()}

    move(model, optimizer, route=None)
    train(model, optimizer, range(2, 3))

    assert {state["step"].device for state in optimizer.state.values()} == before == {torch.device("cpu")}
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_an_optimizer_that_has_not_stepped_yet_trains_the_moved_model(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    train(twin, torch.optim.AdamW(twin.parameters(), 0.05), range(3))

    move(model, optimizer)
    train(model, optimizer, range(3))

    if move.dtype is not torch.bfloat16:
        assert close(model[0].weight, twin[0].weight, rtol=1e-4, atol=1e-5)
    assert not close(model[0].weight, fill(mlp())[0].weight, rtol=1e-2, atol=1e-2)


def test_a_move_between_backward_and_step_keeps_the_gradients_for_the_step(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    for each, its in ((model, optimizer), (twin, reference)):
        train(each, its, range(2))
        each.zero_grad()
        loss_of(each, 2).backward()
    reference.step()

    move(model, optimizer, route=None)
    optimizer.step()

    assert close(model[0].weight, twin[0].weight, **move.tolerance)
    assert host(model[0].weight).isfinite().all()


def test_an_optimizers_checkpoint_from_before_loads(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    train(model, optimizer, range(3))
    checkpoint = copy.deepcopy(optimizer.state_dict())

    move(model, optimizer, route=None)
    optimizer.load_state_dict(checkpoint)
    train(model, optimizer, range(3, 4))

    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}
    assert {state["exp_avg"].device for state in optimizer.state.values()} == {move.device}


def test_an_optimizers_checkpoint_from_afterwards_has_the_same_shape(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    train(model, optimizer, range(1))
    before = optimizer.state_dict()
    shape = ([group["params"] for group in before["param_groups"]], {k: list(v) for k, v in before["state"].items()})

    move(model, optimizer, route=None)
    train(model, optimizer, range(1, 2))

    after = optimizer.state_dict()
    assert (
        [group["params"] for group in after["param_groups"]],
        {k: list(v) for k, v in after["state"].items()},
    ) == shape


@pytest.mark.parametrize("name", ["adam-fused", "adamw-fused", "sgd-fused", "adagrad-fused"])
def test_a_fused_optimizer_on_a_device_without_fused_kernels_is_not_fused_any_more(move: Move, name: str) -> None:
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    model, optimizer = built(move, name)
    train(model, optimizer, range(1))

    move(model, optimizer, route=None)
    train(model, optimizer, range(1, 2))

    supported = move.device.type in _get_fused_kernels_supported_devices()
    # Also after a way through a device that has none.
    assert bool(optimizer.param_groups[0]["fused"]) == supported
    assert bool(optimizer.param_groups[0]["foreach"]) == (not supported)
