"""Promise: gradients arrive with their parameters, as the objects they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.moves import Move, close, same
from tests.promises import where, with_same_objects, with_values
from tests.zoo import MODELS, Tied, fill, loss_of, mlp


def with_gradients(move: Move, name: str = "mlp") -> nn.Module:
    model = move.build(MODELS[name])
    loss_of(model, 0).backward()
    return model


def test_a_gradient_is_where_its_parameter_is(move: Move) -> None:
    model = with_gradients(move)

    move(model)

    for parameter in model.parameters():
        assert (parameter.grad.device, parameter.grad.dtype) == (move.device, move.dtype)


@with_values
def test_a_gradient_keeps_its_value(move: Move) -> None:
    model = with_gradients(move)
    expected = {key: move.cast(parameter.grad) for key, parameter in model.named_parameters()}

    move(model)

    assert [key for key, p in model.named_parameters() if not same(p.grad, expected[key])] == []


@with_same_objects
def test_a_gradient_is_the_object_it_was(move: Move) -> None:
    model = with_gradients(move)
    before = {key: parameter.grad for key, parameter in model.named_parameters()}

    move(model)

    assert [key for key, parameter in model.named_parameters() if parameter.grad is not before[key]] == []


@with_values
def test_the_gradient_of_a_tied_matrix_is_carried_once(move: Move) -> None:
    model = with_gradients(move, "tied")
    expected = move.cast(model.encoder.weight.grad)

    move(model)

    assert same(model.encoder.weight.grad, expected)
    assert model.decoder.weight.grad is model.encoder.weight.grad


@with_same_objects
def test_one_gradient_of_two_parameters_stays_one(move: Move) -> None:
    model = with_gradients(move)
    model[2].weight.grad = None
    model.register_parameter("other", nn.Parameter(model[0].weight.detach().clone()))
    model.other.grad = model[0].weight.grad

    move(model)

    assert model.other.grad is model[0].weight.grad
    assert model.other.grad.device == move.device


def test_a_parameter_without_a_gradient_gets_none(move: Move) -> None:
    model = move.build(mlp)

    move(model)

    assert all(parameter.grad is None for parameter in model.parameters())


@with_values
def test_gradients_go_on_accumulating(move: Move) -> None:
    twin = fill(Tied())
    loss_of(twin, 0).backward()
    loss_of(twin, 1).backward()
    model = with_gradients(move, "tied")

    move(model)
    loss_of(model, 1).backward()

    for key, parameter in model.named_parameters():
        assert close(parameter.grad, twin.get_parameter(key).grad, **move.tolerance), key


@with_same_objects
@with_values
def test_zeroing_in_place_zeroes_the_object_that_was_held(move: Move) -> None:
    model = with_gradients(move)
    held = model[0].weight.grad

    move(model)
    model.zero_grad(set_to_none=False)

    assert same(held, torch.zeros(3, 4, dtype=move.dtype))


@where(lambda conversion: not conversion.keeps_objects)
def test_overwriting_carries_the_gradient_to_the_new_parameter(move: Move) -> None:
    model = with_gradients(move)
    expected = move.cast(model[0].weight.grad)

    move(model)

    assert same(model[0].weight.grad, expected)


def test_the_gradient_of_a_frozen_parameter_is_carried_too(move: Move) -> None:
    model = with_gradients(move)
    model[0].weight.requires_grad_(False)

    move(model)

    assert model[0].weight.grad.device == move.device
    assert not model[0].weight.requires_grad


@with_same_objects
@where(lambda conversion: not conversion.keeps_device)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_gradient_of_another_dtype_on_purpose_keeps_it(move: Move) -> None:
    with torch.device(move.source):
        layer = nn.Linear(4, 2, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    layer.weight.grad = torch.ones(2, 4, device=move.source)

    move(layer)

    assert layer.weight.grad_dtype is torch.float32
    assert (layer.weight.grad.dtype, layer.weight.grad.device) == (torch.float32, move.device)


@with_same_objects
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_parameter_that_takes_any_gradient_still_does(move: Move) -> None:
    layer = move.build(lambda: nn.Linear(4, 2))
    layer.weight.grad_dtype = None

    move(layer)

    assert layer.weight.grad_dtype is None
