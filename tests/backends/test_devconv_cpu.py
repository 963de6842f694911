"""The host's own backend."""

from __future__ import annotations

import pytest
import torch

import devconv

pytestmark = pytest.mark.lane("cpu")


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_host_has_no_index(name):
    device, _ = devconv.resolve(name)
    assert device == torch.device("cpu") == torch.empty(0).device


def test_second_host_is_refused():
    with pytest.raises(devconv.InvalidDeviceError, match="cpu:0"):
        devconv.resolve("cpu:1")


def test_cast_on_the_host_keeps_strides():
    (cast,) = devconv.backend_for("cpu").copy([torch.ones(2, 3).t()], torch.device("cpu"), dtypes=[torch.float64])
    assert (cast.dtype, cast.stride()) == (torch.float64, (1, 3))


def test_free_memory_is_less_than_the_machine_has():
    free = devconv.backend_for("cpu").free_memory(torch.device("cpu"))
    assert 0 < free < 2**50


def test_host_memory_is_host_memory():
    assert devconv.backend_for("cpu").capabilities.host_memory
