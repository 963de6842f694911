"""Random number generators, read and put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from devconv.registry import backend_for

__all__ = ["Generators", "quiet"]


class Generators:
    """The host's generators (torch's, Python's, NumPy's if it is loaded), and those of devices that can be read.

    A device's generator is read through ``torch.<type>``, or through its backend where that has ``get_rng_state`` and
    ``set_rng_state``.

    Args:
        device_types: types whose generators to include.
    """

    def __init__(self, device_types: set[str] | frozenset[str] = frozenset()) -> None:
        self._devices: list[Any] = []
        self.unreadable: list[str] = []
        for kind in sorted(device_types - {"cpu", "meta"}):
            source = next((one for one in (getattr(torch, kind, None), backend_for(kind)) if _can_be_read(one)), None)
            if source is None:
                self.unreadable.append(kind)
            else:
                self._devices.append(source)
        self._numpy: Any = sys.modules.get("numpy")

    def state(self) -> list[Any]:
        """Where every generator is now."""
        numpy_state = None if self._numpy is None else self._numpy.random.get_state()
        devices = [device.get_rng_state() for device in self._devices]
        return [torch.get_rng_state(), random.getstate(), numpy_state, *devices]

    def restore(self, state: list[Any]) -> None:
        """Put every generator where it was."""
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        if self._numpy is not None:
            self._numpy.random.set_state(state[2])
        for device, value in zip(self._devices, state[3:], strict=True):
            device.set_rng_state(value)


def _can_be_read(source: Any) -> bool:
    return hasattr(source, "get_rng_state") and hasattr(source, "set_rng_state")


@contextmanager
def quiet() -> Iterator[None]:
    """Leave the host's generators as they were."""
    generators = Generators()
    state = generators.state()
    try:
        yield
    finally:
        generators.restore(state)
