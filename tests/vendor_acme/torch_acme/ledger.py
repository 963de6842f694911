"""The device's books, as values that can be subtracted: ``ledger() - before`` is what happened since."""

from __future__ import annotations

from dataclasses import dataclass, fields

from . import _C


@dataclass(frozen=True)
class Traffic:
    """Copies in one direction, and the bytes that arrived by them."""

    copies: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.copies + other.copies, self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.copies - other.copies, self.bytes - other.bytes)


@dataclass(frozen=True)
class Ledger:
    """What a device did since the process started.

    Attributes:
        allocations: blocks of memory that were handed out.
        live_blocks: of these, the ones not given back yet.
        live_bytes: bytes in them.
        peak_bytes: the most there were at once, since `reset_peak`.
        sent: copies from the host, counted where they arrived.
        fetched: copies to the host, counted where they came from.
        copied: copies between acme tensors, counted where they arrived.
        batches: lists of tensors that crossed in one call.
        fallback: copies that operators without a kernel needed to run on the host.
        fallback_calls: such operators.
    """

    allocations: int = 0
    live_blocks: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    sent: Traffic = Traffic()
    fetched: Traffic = Traffic()
    copied: Traffic = Traffic()
    batches: int = 0
    fallback: Traffic = Traffic()
    fallback_calls: int = 0

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})

    def __sub__(self, other: Ledger) -> Ledger:
        return Ledger(**{item.name: getattr(self, item.name) - getattr(other, item.name) for item in fields(self)})


def ledger(device: int | None = None) -> Ledger:
    """The books of one device, or of all of them together (peaks added up)."""
    total = Ledger()
    for index in range(_C.device_count()) if device is None else [device]:
        books = _C.read_ledger(index)
        total += Ledger(**{name: Traffic(*item) if isinstance(item, tuple) else item for name, item in books.items()})
    return total


def reset_peak() -> None:
    """Start every device's peak again from what is alive now."""
    for index in range(_C.device_count()):
        _C.reset_peak(index)
