"""The state of the flag: one value for the process, and scopes that override it in one context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["active", "override", "set_process_wide"]

_process_wide = False
_override: ContextVar[bool | None] = ContextVar("devconv_registry_conversion", default=None)


def active() -> bool:
    """Whether conversions go by the registry here: in this thread and context."""
    override = _override.get()
    return _process_wide if override is None else override


def set_process_wide(value: bool) -> bool:
    """Set the value for the process; returns the one before."""
    global _process_wide
    before, _process_wide = _process_wide, value
    return before


@contextmanager
def override(value: bool) -> Iterator[None]:
    """Override the process's value in this context. Scopes nest; other threads do not see them."""
    before = _override.get()
    try:
        # Inside, and put back by value: an interrupt between a set and the keeping of its token would leave it set.
        _override.set(value)
        yield
    finally:
        _override.set(before)
