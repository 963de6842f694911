"""Backends whose hardware the test machines lack say so, at once and with the cure, and stay out of the way."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

import devconv

HERE = {
    "mps": torch.backends.mps.is_available,
    "tpu": lambda: find_spec("torch_tpu") is not None,
    "xpu": torch.xpu.is_available,
}
CURES = {"mps": "macOS", "tpu": "Install TorchTPU", "xpu": "XPU build of torch"}


@pytest.mark.parametrize("device_type", HERE)
def test_moving_to_hardware_that_is_not_there_says_what_to_install(device_type):
    if HERE[device_type]():
        pytest.skip(f"{device_type} is here")
    model = nn.Linear(2, 2)

    with pytest.raises(devconv.UnavailableDeviceError, match=CURES[device_type]) as raised:
        devconv.convert(model, device_type)

    assert raised.value.device_type == device_type
    assert model.weight.device.type == "cpu"


@pytest.mark.parametrize("device_type", HERE)
def test_the_distribution_of_an_absent_device_is_listed_all_the_same(device_type):
    (found,) = [entry for entry in devconv.registrations() if entry.device_type == device_type]

    assert found.origin.startswith("devconv ")
    assert found.status in ("installed", "missing hardware", "loaded")
