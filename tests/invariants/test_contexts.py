"""Promise: the mode that a conversion happens in does not leak into the model: no_grad, inference mode, a default device,
autocast, fake tensors, a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.moves import Move, close, named_tensors, same
from tests.promises import where, with_same_objects, with_values
from tests.zoo import Tied, fill, mlp, train


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing, as profilers and counters are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[Move], AbstractContextManager[Any]]] = {
    "none": lambda move: nullcontext(),
    "no-grad": lambda move: torch.no_grad(),
    "enable-grad": lambda move: torch.enable_grad(),
    "inference-mode": lambda move: torch.inference_mode(),
    "default-device-meta": lambda move: torch.device("meta"),
    "default-device-source": lambda move: torch.device(move.source),
    "default-device-target": lambda move: torch.device(move.device),
    "autocast": lambda move: torch.autocast("cpu", torch.bfloat16),
    "dispatch-mode": lambda move: Passing(),
    "anomaly": lambda move: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda move: _deterministic(),
}


class _deterministic:
    """torch's deterministic algorithms, which also fill new memory."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


every_context = pytest.mark.parametrize("context", CONTEXTS)


def skip_where_the_device_cannot(move: Move, context: str) -> None:
    if context == "dispatch-mode" and "xla" in (move.source.type, move.device.type):
        pytest.skip("not applicable: under a dispatch mode XLA makes tensors that its own functions do not take")


@every_context
def test_the_model_arrives(move: Move, context: str) -> None:
    skip_where_the_device_cannot(move, context)
    model = move.build(Tied)
    expected = move.expected(model)

    with CONTEXTS[context](move):
        move(model, route=None)

    assert {tensor.device for _, tensor in named_tensors(model)} == {move.device}
    assert model.decoder.weight is model.encoder.weight
    if move.conversion.has_values:
        assert [key for key, tensor in named_tensors(model) if not same(tensor, expected[key])] == []


@with_values
@every_context
def test_the_model_trains_afterwards(move: Move, context: str) -> None:
    skip_where_the_device_cannot(move, context)
    model, twin = move.build(mlp), fill(mlp())
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    train(twin, reference, range(4))
    train(model, optimizer, range(2))

    with CONTEXTS[context](move):
        move(model, optimizer, route=None)
    train(model, optimizer, range(2, 4))

    assert close(model[0].weight, twin[0].weight, **move.tolerance)


@every_context
def test_parameters_are_ordinary_afterwards(move: Move, context: str) -> None:
    skip_where_the_device_cannot(move, context)
    model = move.build(Tied)

    with CONTEXTS[context](move):
        move(model, route=None)

    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.is_leaf, name
        assert not parameter.is_inference(), name
        assert type(parameter) is nn.Parameter, name


@every_context
def test_the_mode_is_as_it_was_afterwards(move: Move, context: str) -> None:
    skip_where_the_device_cannot(move, context)
    model = move.build(Tied)

    with CONTEXTS[context](move):
        before = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device())
        move(model, route=None)
        after = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device())

    assert after == before


@where(
    lambda conversion: (
        conversion.source == "cpu" and conversion.device.type in ("cpu", "meta") and not conversion.future
    )
)
def test_a_model_of_fake_tensors_moves_as_in_stock_torch(move: Move) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        model = mlp()
        move(model, route=None)

    assert {type(parameter.data) for parameter in model.parameters()} == {FakeTensor} or all(
        isinstance(parameter, FakeTensor) for parameter in model.parameters()
    )
    assert {parameter.dtype for parameter in model.parameters()} == {move.dtype}
    assert {parameter.device for parameter in model.parameters()} == {move.device}


@with_same_objects
@where(lambda conversion: conversion.source == "cpu" and conversion.device.type == "cpu" and not conversion.future)
def test_a_real_model_under_fake_mode_is_left_whole(move: Move) -> None:
    # Whatever the outcome, a real model must not end up half fake.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    model = move.build(mlp)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            move(model, route=None)
    except Exception:  # noqa: BLE001 - a refusal is one of the right outcomes
        assert move.failed == "untouched"
    kinds = {
        isinstance(parameter, FakeTensor) or isinstance(parameter.data, FakeTensor) for parameter in model.parameters()
    }
    assert len(kinds) == 1


def test_a_default_dtype_does_not_matter(move: Move) -> None:
    model = move.build(mlp)
    torch.set_default_dtype(torch.float64)
    try:
        move(model)
    finally:
        torch.set_default_dtype(torch.float32)

    assert {parameter.dtype for parameter in model.parameters()} == {move.dtype}
