"""Faults on cue: what the device is told to get wrong, from now on or inside a ``with``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import _C

KINDS = ("foreign", "set-data")


def set_memory_limit(limit: int | None, device: int | None = None) -> None:
    """Let a device (None: each of them) run out of memory past so many live bytes; None takes the limit away."""
    for index in range(_C.device_count()) if device is None else [device]:
        _C.set_memory_limit(index, _C.bytes_per_device if limit is None else limit)


def memory_limit(device: int = 0) -> int:
    """Bytes that may be alive on a device."""
    return _C.memory_limit(device)


def fail_copy(ordinal: int | None, *, from_there_on: bool = False) -> None:
    """Let the ``ordinal``-th copy from now raise a RuntimeError, once or with every one after it; 1 is the next.

    Only copies that somebody asked for count, not those by which an operator without a kernel gets to the host.
    """
    if ordinal is not None and ordinal < 1:
        raise ValueError(f"copies are counted from 1, got {ordinal}")
    _C.fail_copy(ordinal or 0, from_there_on)


def refuse_float64(refuse: bool = True) -> None:
    """Be a device without 64-bit floats: making such a tensor raises TypeError."""
    _C.set_refuses_float64(refuse)


def set_kind(kind: str) -> None:
    """Choose the kind of the tensors made from now on.

    ``"foreign"``: only acme tensors can take an acme tensor's place by ``param.data = new``. ``"set-data"``: those of
    the host can too, and the other way round, as on cuda.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is one of {KINDS}, got {kind!r}")
    _C.set_shares_impl(kind == "set-data")


def clear_faults() -> None:
    """No limit, no failing copy, 64-bit floats. The kind stays."""
    set_memory_limit(None)
    fail_copy(None)
    refuse_float64(False)


@contextmanager
def faults(
    *,
    memory: int | None = None,
    copy: int | None = None,
    from_there_on: bool = False,
    float64: bool = True,
    kind: str | None = None,
) -> Iterator[None]:
    """The faults above inside the block.

    Args:
        memory: live bytes that each device may have.
        copy: number of the copy that fails.
        from_there_on: every later copy fails too.
        float64: whether the device has 64-bit floats.
        kind: the kind of device, None leaves it.
    """
    before_kind = KINDS[_C.shares_impl()]
    before_float64 = _C.refuses_float64()
    before_limits = [_C.memory_limit(index) for index in range(_C.device_count())]
    set_kind(kind or before_kind)
    refuse_float64(before_float64 or not float64)
    if memory is not None:
        set_memory_limit(memory)
    fail_copy(copy, from_there_on=from_there_on)
    try:
        yield
    finally:
        fail_copy(None)
        for index, limit in enumerate(before_limits):
            _C.set_memory_limit(index, limit)
        refuse_float64(before_float64)
        set_kind(before_kind)
