"""Optimizers follow their parameters: the log of moves, and what goes along."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD, Adam, AdamW

import devconv
from devconv import following


def _trained(optimizer_class=Adam, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), **({"lr": 0.1} | options))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _state(optimizer, model):
    return optimizer.state[model.weight]


def test_state_that_was_where_its_parameter_was_follows():
    model, optimizer = _trained()

    devconv.convert(model, dtype=torch.float64)
    devconv.follow(optimizer)

    assert _state(optimizer, model)["exp_avg"].dtype is torch.float64


def test_master_state_in_another_dtype_stays():
    model, optimizer = _trained()
    _state(optimizer, model)["exp_avg"] = _state(optimizer, model)["exp_avg"].to(torch.float16)

    devconv.convert(model, dtype=torch.float64)
    devconv.follow(optimizer)

    assert _state(optimizer, model)["exp_avg"].dtype is torch.float16


def test_offloaded_state_stays():
    model, optimizer = _trained()
    _state(optimizer, model)["exp_avg"] = _state(optimizer, model)["exp_avg"].to("meta")

    devconv.convert(model, dtype=torch.float64)
    devconv.follow(optimizer)

    assert _state(optimizer, model)["exp_avg"].device.type == "meta"


def test_step_stays_a_float32_on_the_host():
    model, optimizer = _trained()

    devconv.convert(model, dtype=torch.float64, optimizers=optimizer)

    assert _state(optimizer, model)["step"].dtype is torch.float32
    assert _state(optimizer, model)["step"].device.type == "cpu"


def test_without_a_flag_nothing_follows_by_itself():
    model, optimizer = _trained()

    devconv.convert(model, "meta")

    assert _state(optimizer, model)["exp_avg"].device.type == "cpu"


def test_with_the_flag_it_follows_at_the_next_step_also_after_the_scope_has_ended():
    model, optimizer = _trained()
    with devconv.registry_conversion():
        model.double()

    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()

    assert _state(optimizer, model)["exp_avg"].dtype is torch.float64


def test_an_overwritten_parameter_takes_its_group_and_its_state_along():
    model, optimizer = _trained(SGD, momentum=0.9)
    old, momentum = model.weight, optimizer.state[model.weight]["momentum_buffer"].clone()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        devconv.convert(model, dtype=torch.float64, optimizers=optimizer)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)

    assert model.weight is not old
    assert any(parameter is model.weight for parameter in optimizer.param_groups[0]["params"])
    assert old not in optimizer.state
    torch.testing.assert_close(_state(optimizer, model)["momentum_buffer"], momentum.double())


def test_a_parameter_overwritten_twice_is_found():
    model, optimizer = _trained(SGD, momentum=0.9)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        devconv.convert(model, dtype=torch.float64)
        devconv.convert(model, dtype=torch.float32)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)

    devconv.follow(optimizer)

    assert all(
        ours is theirs for ours, theirs in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
    )


def test_a_fused_optimizer_becomes_foreach_where_there_are_no_fused_kernels():
    model, optimizer = _trained(AdamW, fused=True)

    report = devconv.convert(model, "meta", optimizers=optimizer)

    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (False, True)
    assert any("fused" in note for note in report.notes)


def test_a_tensor_learning_rate_goes_along_and_keeps_its_dtype():
    model, optimizer = _trained(lr=torch.tensor(0.1), foreach=False, capturable=False)

    devconv.convert(model, "meta", optimizers=optimizer)

    assert optimizer.param_groups[0]["lr"].device.type == "meta"
    assert optimizer.param_groups[0]["lr"].dtype is torch.float32


def test_a_round_trip_made_again_and_again_leaves_a_log_of_one_length():
    model = nn.Linear(2, 2)
    lengths = []

    for _ in range(5):
        devconv.convert(model, dtype=torch.float64)
        devconv.convert(model, dtype=torch.float32)
        lengths.append(len(following._moves))

    assert len(set(lengths)) == 1


def test_a_dropped_model_leaves_the_log():
    model = nn.Linear(2, 2)
    devconv.convert(model, dtype=torch.float64)
    del model
    gc.collect()

    devconv.convert(other := nn.Linear(2, 2), dtype=torch.float64)

    assert [move for _, move in following._moves if move.is_gone()] == []
    assert other.weight.dtype is torch.float64


def test_another_parameter_at_the_same_address_is_not_taken_for_the_old_one():
    model, stranger = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    owners = following.Owners([model.weight, stranger], [(model, "")], [0, 0], ["weight", "bias"])
    move = following.Move(torch.device("cpu"), torch.float32, owners, {})

    assert move.took(model.weight)
    assert not move.took(stranger)


def test_an_optimizer_catches_up_with_a_model_that_is_there_already():
    model, optimizer = _trained()
    devconv.convert(model, dtype=torch.float64)

    devconv.convert(model, dtype=torch.float64, optimizers=optimizer)

    assert {value.dtype for value in _state(optimizer, model).values() if value.dim()} == {torch.float64}


def test_what_an_optimizer_made_after_the_move_keeps_elsewhere_stays_there():
    model = nn.Linear(2, 1)
    with devconv.registry_conversion():
        model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.state[model.weight]["master"] = model.weight.detach().float()
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()

        optimizer.step()

    assert optimizer.state[model.weight]["master"].dtype is torch.float32


def _prune(model):
    prune.l1_unstructured(model, "weight", 0.5)
    return model


def _parametrize(model):
    nn.utils.parametrize.register_parametrization(model, "weight", nn.Identity())
    return model


@pytest.mark.parametrize("change", [_prune, _parametrize])
def test_state_follows_a_parameter_that_got_another_place_after_the_move(change):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    weight = model.weight
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with devconv.registry_conversion():
        model.double()
        model = change(model)
        gc.collect()

        optimizer.zero_grad()
        model(torch.ones(1, 2).double()).sum().backward()
        optimizer.step()

    assert optimizer.state[weight]["momentum_buffer"].dtype is torch.float64


def test_the_flat_state_of_lbfgs_goes_along_whatever_the_first_parameters_dtype():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        x = torch.ones(1, 2, dtype=model[0].weight.dtype)
        loss = model[1](model[0](x).to(model[1].weight.dtype)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    devconv.convert(model, dtype=torch.float64, optimizers=optimizer)
    optimizer.step(closure)

    state = optimizer.state[model[0].weight]
    assert state["d"].dtype is torch.float64


@pytest.mark.parametrize("thing", [3, object(), "adam", nn.Linear(1, 1)])
def test_follow_takes_optimizers_only(thing):
    with pytest.raises(devconv.OptimizerMismatchError):
        devconv.follow(thing)


def test_reconcile_can_be_taken_back():
    model, optimizer = _trained()
    before = {key: value.clone() for key, value in _state(optimizer, model).items()}
    devconv.convert(model, dtype=torch.float64)

    undos = []
    following.reconcile(optimizer, journal=undos.append)
    (undo,) = undos
    undo()
    undo()

    for key, value in before.items():
        assert torch.equal(_state(optimizer, model)[key], value)
        assert _state(optimizer, model)[key].dtype is value.dtype


def test_state_that_follows_under_inference_mode_can_be_written_later():
    model, optimizer = _trained()
    devconv.convert(model, dtype=torch.float64)

    with torch.inference_mode():
        devconv.follow(optimizer)
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()

    assert not _state(optimizer, model)["exp_avg"].is_inference()
