"""Promise: what works together with an optimizer goes on: other optimizers, schedulers, scalers, averages, and state that
was put somewhere else on purpose."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import devconv
from tests.moves import Move, close, host, same
from tests.promises import where, with_same_objects, with_values
from tests.zoo import fill, loss_of, mlp, state_of, train

pytestmark = with_values

SCHEDULERS = {
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=True),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on(move: Move, name: str) -> None:
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    schedule, wanted = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
    for step in range(6):
        train(twin, reference, range(step, step + 1))
        wanted.step()
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        schedule.step()

    move(model, optimizer, route=None)
    for step in range(3, 6):
        train(model, optimizer, range(step, step + 1))
        schedule.step()

    assert schedule.get_last_lr() == wanted.get_last_lr()
    assert close(model[0].weight, twin[0].weight, **move.tolerance)


def test_a_schedule_on_a_metric_goes_on(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = ReduceLROnPlateau(optimizer, patience=0)
    schedule.step(1.0)

    move(model, optimizer)
    train(model, optimizer, range(1))
    schedule.step(2.0)

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_two_optimizers_that_share_parameters_both_follow(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())

    def pair(each: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(each.parameters(), 0.05, momentum=0.9),
            torch.optim.Adam(each[0].parameters(), 0.05),
        ]

    mine, its = pair(model), pair(twin)
    for step in range(6):
        for optimizer in its:
            train(twin, optimizer, range(step, step + 1))
    for step in range(3):
        for optimizer in mine:
            train(model, optimizer, range(step, step + 1))

    move(model, *mine, route=None)
    for step in range(3, 6):
        for optimizer in mine:
            train(model, optimizer, range(step, step + 1))

    for optimizer, reference in zip(mine, its, strict=True):
        state, wanted = state_of(optimizer), state_of(reference)
        tolerance = {"rtol": 1e-1, "atol": 5e-2} if move.dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        assert [key for key in wanted if not close(state[key], wanted[key], **tolerance)] == []


def test_an_optimizer_of_a_part_of_the_model_follows(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each[2].parameters(), 0.1, momentum=0.9) for each in (model, twin))
    train(twin, reference, range(4))
    train(model, optimizer, range(2))

    move(model, optimizer, route=None)
    train(model, optimizer, range(2, 4))

    assert close(model[2].weight, twin[2].weight, **move.tolerance)


def test_only_the_part_that_moved_is_followed(move: Move) -> None:
    model = move.build(lambda: nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    move(model[0], optimizer, route=None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    buffers = [optimizer.state[layer.weight]["momentum_buffer"] for layer in model]
    assert [(b.device, b.dtype) for b in buffers] == [(move.device, move.dtype), (move.source, torch.float32)]


@pytest.mark.parametrize("key", ["lr", "betas"])
def test_a_tensor_among_the_settings_goes_on_counting(move: Move, key: str) -> None:
    if move.source.type != "cpu":
        pytest.skip("not applicable: torch takes tensor settings on this device for capturable groups only")
    settings = {"lr": {"lr": torch.tensor(0.05)}, "betas": {"betas": (torch.tensor(0.8), torch.tensor(0.95))}}[key]
    settings = {"foreach": False, "capturable": False, **settings}
    model, twin = move.build(mlp), fill(mlp())
    try:
        optimizer, reference = (torch.optim.Adam(e.parameters(), **copy.deepcopy(settings)) for e in (model, twin))
    except ValueError as error:
        pytest.skip(f"not applicable: {error}")
    train(twin, reference, range(4))
    train(model, optimizer, range(2))

    move(model, optimizer, route=None)
    train(model, optimizer, range(2, 4))

    tolerance = {"rtol": 1e-1, "atol": 5e-2} if move.dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert close(model[0].weight, twin[0].weight, **tolerance)


@with_same_objects
@where(lambda conversion: not conversion.keeps_device)
def test_state_that_was_offloaded_stays_where_it_is(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, range(1))
    elsewhere = torch.device("meta")
    state = optimizer.state[model[0].weight]
    state["kept"] = torch.ones(3, device=elsewhere)

    move(model, optimizer, route=None)
    train(model, optimizer, range(1, 2))

    assert state["kept"].device == elsewhere
    assert state["momentum_buffer"].device == move.device


@with_same_objects
@where(lambda conversion: conversion.dtype is torch.bfloat16)
def test_a_float32_master_copy_beside_half_precision_parameters_stays_float32(move: Move) -> None:
    # The state was not of its parameter's dtype, so it does not follow the parameter's dtype.
    model = move.build(mlp).to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight = model[0].weight
    optimizer.state[weight]["master"] = weight.detach().float()

    move(model, optimizer, route=None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    assert optimizer.state[weight]["master"].dtype is torch.float32


def test_a_gradient_scaler_goes_on(move: Move) -> None:
    if "xla" in (move.device.type, move.source.type) or "acme" in (move.device.type, move.source.type):
        pytest.skip("not applicable: torch's GradScaler has no kernels there")
    if not move.conversion.keeps_device:
        pytest.skip("not applicable: a scaler belongs to one device type")
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    scaler, its = (torch.amp.GradScaler(move.device.type, init_scale=8.0) for _ in range(2))

    def step(each: nn.Module, by: torch.optim.Optimizer, scaling: torch.amp.GradScaler, number: int) -> None:
        by.zero_grad()
        scaling.scale(loss_of(each, number)).backward()
        scaling.step(by)
        scaling.update()

    for number in range(4):
        step(twin, reference, its, number)
    for number in range(2):
        step(model, optimizer, scaler, number)

    move(model, optimizer, route=None)
    for number in range(2, 4):
        step(model, optimizer, scaler, number)

    assert close(model[0].weight, twin[0].weight, **move.tolerance)
    assert scaler.get_scale() == its.get_scale()


def test_a_scaled_loss_from_before_the_move_is_unscaled_by_the_step(move: Move) -> None:
    if move.source.type not in ("cpu", "cuda") or not move.conversion.keeps_device:
        pytest.skip("not applicable: a scaler belongs to one device type")
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin))
    scaler, its = (torch.amp.GradScaler(move.device.type, init_scale=8.0) for _ in range(2))
    loss = scaler.scale(loss_of(model, 0))
    its.scale(loss_of(twin, 0)).backward()
    its.step(reference)

    move(model, optimizer, route=None)
    loss.backward()
    scaler.step(optimizer)

    assert close(model[0].weight, twin[0].weight, **move.tolerance)


@pytest.mark.parametrize("kind", ["mean", "ema"])
def test_an_averaged_model_that_moves_as_a_whole_goes_on_averaging(move: Move, kind: str) -> None:
    arguments = {} if kind == "mean" else {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}
    model, twin = move.build(mlp), fill(mlp())
    average, its = AveragedModel(model, **arguments), AveragedModel(twin, **arguments)
    for each, averaged in ((model, average), (twin, its)):
        averaged.update_parameters(each)
        with torch.no_grad():
            each[0].weight.add_(1)

    move(nn.ModuleList([model, average]), route=None)
    average.update_parameters(model)
    its.update_parameters(twin)

    assert close(average.module[0].weight, its.module[0].weight, **move.tolerance)
    assert int(average.n_averaged) == 2
    # It is an integer buffer that torch makes on the host: a change of dtype leaves it there.
    assert average.n_averaged.device == (torch.device("cpu") if move.conversion.keeps_device else move.device)


def test_an_optimizer_that_is_followed_later_by_name_goes_on(move: Move) -> None:
    if move.mode != "flag":
        pytest.skip("not applicable: convert takes the optimizers itself")
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.Adam(each.parameters(), 0.05) for each in (model, twin))
    train(twin, reference, range(4))
    train(model, optimizer, range(2))

    move(model, route=None)
    devconv.follow(optimizer)
    moved = [(s["exp_avg"].device, s["exp_avg"].dtype) for s in optimizer.state.values()]
    train(model, optimizer, range(2, 4))

    assert set(moved) == {(move.device, move.dtype)}
    tolerance = {"rtol": 1e-1, "atol": 5e-2} if move.dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert close(model[0].weight, twin[0].weight, **tolerance)


def test_several_moves_before_the_next_step_are_followed_together(move: Move) -> None:
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    train(twin, reference, range(4))
    train(model, optimizer, range(2))

    move(model, optimizer, route=None)
    move.back(model, optimizer)
    move(model, optimizer, route=None)
    train(model, optimizer, range(2, 4))

    assert close(model[0].weight, twin[0].weight, **move.tolerance)


def test_an_optimizer_without_the_moved_parameters_is_not_touched(move: Move) -> None:
    other = fill(mlp())
    bystander = torch.optim.Adam(other.parameters(), 0.05)
    train(other, bystander, range(2))
    before = {key: (id(tensor), tensor.clone()) for key, tensor in state_of(bystander).items() if "step" not in key}

    model = move.build(mlp)
    move(model, route=None)
    bystander.zero_grad()
    for parameter in other.parameters():
        parameter.grad = None
    bystander.step()

    after = state_of(bystander)
    assert [
        key for key, (identity, value) in before.items() if id(after[key]) != identity or not same(after[key], value)
    ] == []


def test_add_param_group_after_the_move_trains_both(move: Move) -> None:
    model = move.build(mlp)
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    train(model, optimizer, range(1))

    move(model, optimizer, route=None)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    before = host(model[2].weight).clone()
    train(model, optimizer, range(1, 2))

    assert not close(model[2].weight, before)
