"""Promise: bad input is a clear error that names it, and the model is what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import devconv
from tests.moves import device_is_here, named_tensors
from tests.zoo import fill, mlp

BAD_DEVICES = [
    pytest.param("nosuchdevice", devconv.UnknownDeviceError, "nosuchdevice", id="unknown"),
    pytest.param("nosuchdevice:1", devconv.UnknownDeviceError, "nosuchdevice", id="unknown-index"),
    pytest.param("not a device", devconv.InvalidDeviceError, "not a device", id="no-device"),
    pytest.param("", devconv.InvalidDeviceError, "''", id="empty"),
    pytest.param("cpu:one", devconv.InvalidDeviceError, "cpu:one", id="no-index"),
    pytest.param("cpu:1", devconv.InvalidDeviceError, "cpu:1", id="no-such-cpu"),
    pytest.param(3.5, devconv.InvalidDeviceError, "3.5", id="float"),
    pytest.param(object, devconv.InvalidDeviceError, "object", id="class"),
    pytest.param(
        "xla:9",
        devconv.InvalidDeviceError if device_is_here("xla") else devconv.UnavailableDeviceError,
        "xla",
        id="no-such-xla",
    ),
    pytest.param(
        "cuda:99",
        devconv.InvalidDeviceError if device_is_here("cuda") else devconv.UnavailableDeviceError,
        "cuda",
        id="no-such-cuda",
    ),
]
bad_device = pytest.mark.parametrize(("device", "error", "named"), BAD_DEVICES)


def state(model: nn.Module) -> list[tuple[Any, ...]]:
    return [(key, id(t), t.device, t.dtype, t._version, t.requires_grad) for key, t in named_tensors(model)]


@bad_device
def test_convert_names_the_device_and_changes_nothing(device: Any, error: type[Exception], named: str) -> None:
    model = fill(mlp())
    before = state(model)

    with pytest.raises(error, match=None) as caught:
        devconv.convert(model, device)

    assert named in str(caught.value)
    assert state(model) == before


@bad_device
def test_plan_names_the_device_and_changes_nothing(device: Any, error: type[Exception], named: str) -> None:
    model = fill(mlp())
    before = state(model)

    with pytest.raises(error) as caught:
        devconv.plan(model, device)

    assert named in str(caught.value)
    assert state(model) == before


@pytest.mark.parametrize("device", ["xla:9", "cuda:99", "cpu:1", "nosuchdevice", "not a device", 3.5])
def test_the_flag_changes_nothing_either(device: Any) -> None:
    # Device strings that torch itself cannot read fail in nn.Module.to, before anything of devconv's.
    model = fill(mlp())
    before = state(model)

    with devconv.registry_conversion(), pytest.raises((devconv.DevconvError, RuntimeError, TypeError)):
        model.to(device)

    assert state(model) == before


@pytest.mark.parametrize("thing", [torch.ones(2), [fill(mlp())], "model", None, mlp, nn.Linear])
@pytest.mark.parametrize("call", [devconv.convert, devconv.plan])
def test_something_that_is_no_module_is_refused_by_its_type(call: Callable[..., Any], thing: Any) -> None:
    with pytest.raises(devconv.NotAModuleError) as caught:
        call(thing, "cpu")

    assert type(thing).__qualname__ in str(caught.value)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = fill(mlp()), fill(mlp())
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    before = state(model)

    with pytest.raises(devconv.OptimizerMismatchError, match="SGD"):
        devconv.convert(model, dtype=torch.float64, optimizers=foreign)

    assert state(model) == before


@pytest.mark.parametrize("thing", ["adam", object(), nn.Linear(1, 1), 3])
def test_something_that_is_no_optimizer_is_refused(thing: Any) -> None:
    model = fill(mlp())
    before = state(model)

    with pytest.raises(devconv.OptimizerMismatchError):
        devconv.convert(model, dtype=torch.float64, optimizers=thing)

    assert state(model) == before


def test_one_foreign_optimizer_among_good_ones_refuses_all() -> None:
    model, other = fill(mlp()), fill(mlp())
    good = torch.optim.SGD(model.parameters(), 0.1)
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    before = state(model)

    with pytest.raises(devconv.OptimizerMismatchError):
        devconv.convert(model, dtype=torch.float64, optimizers=[good, foreign])

    assert state(model) == before


def test_an_integer_dtype_is_torchs_own_error() -> None:
    model = fill(mlp())

    with pytest.raises(TypeError, match="floating point"):
        devconv.convert(model, dtype=torch.int64)

    assert model[0].weight.dtype is torch.float32


def test_a_dtype_that_is_none_is_a_type_error() -> None:
    model = fill(mlp())

    with pytest.raises(TypeError):
        devconv.convert(model, "cpu", "float64")  # type: ignore[arg-type]

    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("call", [devconv.convert, devconv.plan])
def test_a_call_that_asks_for_nothing_changes_nothing(call: Callable[..., Any]) -> None:
    model = fill(mlp())
    before = state(model)

    call(model)

    assert state(model) == before


def test_what_moves_nested_inputs_refuses_an_unknown_device() -> None:
    with pytest.raises(devconv.UnknownDeviceError, match="nosuchdevice"):
        devconv.move({"x": [torch.ones(2)]}, "nosuchdevice")
