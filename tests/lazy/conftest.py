"""The devices of the lane, and the flag with what it repairs of lazy modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import devconv
from tests.moves import device_is_here

DEVICES = tuple(
    name for name in ("cpu", "meta", "xla:0", "cuda:0") if device_is_here(torch.device(name.split(":")[0]).type)
)


flag_on = devconv.registry_conversion
"""The flag; the table that it installs has the lines of devconv.lazy among the others."""


@pytest.fixture
def flag() -> Iterator[None]:
    with flag_on():
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device of the lane, ready."""
    devconv.prepare(request.param)
    return torch.device(request.param)


@pytest.fixture(params=[name for name in DEVICES if name != "meta"])
def real_device(request: pytest.FixtureRequest) -> torch.device:
    """Every device of the lane that computes."""
    devconv.prepare(request.param)
    return torch.device(request.param)


@pytest.fixture
def other_device() -> torch.device:
    """A device that is not the CPU, on every lane: meta where the lane has no other."""
    name = next((name for name in ("xla:0", "cuda:0") if name in DEVICES), "meta")
    devconv.prepare(name)
    return torch.device(name)
