"""What torch calls ``torch.acme``: the functions that its own code expects of a device's module."""

from __future__ import annotations

import os
from types import TracebackType

import torch
from torch import Tensor

from . import _C

_initialized = True  # torch.utils.checkpoint asks, before it keeps the generators' states
_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)


def _is_in_bad_fork() -> bool:
    """Whether this process was forked off one that had the device: its memory is the parent's."""
    return _forked


def _index(device: int | str | torch.device | None) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


def is_available() -> bool:
    """Whether there is a device."""
    return _C.device_count() > 0


def is_initialized() -> bool:
    """Whether there is a device; nothing has to be started."""
    return is_available()


def _lazy_init() -> None:
    """Nothing has to be started."""


def device_count() -> int:
    """Number of devices."""
    return _C.device_count()


def current_device() -> int:
    """Index of the calling thread's device."""
    return _C.current_device()


def set_device(device: int | str | torch.device) -> None:
    """Make a device the calling thread's."""
    _C.set_device(_index(device))


class device:
    """``with torch.acme.device(1):`` works on a device and goes back to the one before. A negative index does neither."""

    def __init__(self, device: int | str | torch.device) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        if self.index >= 0:
            set_device(self.index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_device(self.before)


def synchronize(device: int | str | torch.device | None = None) -> None:
    """Wait for a device. It works synchronously: there is never anything to wait for."""


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _C.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator; ``torch.manual_seed`` calls it."""
    for index in range(device_count()):
        _C.default_generator(index).manual_seed(seed)


def seed() -> None:
    """Seed the current device's generator with a number of its own."""
    _C.default_generator(current_device()).seed()


def initial_seed() -> int:
    """What the current device's generator was seeded with."""
    return _C.default_generator(current_device()).initial_seed()


def get_rng_state(device: int | str | torch.device = "acme") -> Tensor:
    """State of a device's generator, on the host."""
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state: Tensor, device: int | str | torch.device = "acme") -> None:
    """Put a state back."""
    _C.default_generator(_index(device)).set_state(state)


def memory_allocated(device: int | str | torch.device | None = None) -> int:
    """Bytes alive on a device."""
    return _C.read_ledger(_index(device))["live_bytes"]


def max_memory_allocated(device: int | str | torch.device | None = None) -> int:
    """The most bytes that were alive at once."""
    return _C.read_ledger(_index(device))["peak_bytes"]


def reset_peak_memory_stats(device: int | str | torch.device | None = None) -> None:
    """Start the peak again from what is alive now."""
    _C.reset_peak(_index(device))


def mem_get_info(device: int | str | torch.device | None = None) -> tuple[int, int]:
    """Bytes free and bytes there are."""
    limit = _C.memory_limit(_index(device))
    return max(limit - memory_allocated(device), 0), limit


def empty_cache() -> None:
    """Freed memory is free at once."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What ``torch.autocast("acme")`` may cast to."""
    return [torch.float16, torch.bfloat16]
