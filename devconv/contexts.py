"""A context variable's value for the time of some steps, whatever interrupts them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import TypeVar

__all__ = ["run_with"]

T = TypeVar("T")
V = TypeVar("V")


def run_with(variable: ContextVar[V], value: V, steps: Callable[[], T]) -> T:
    """Take steps in a copy of the context in which `variable` has `value`.

    The interpreter drops the copy by itself. A value that has to be set back stays when an interrupt arrives between
    setting it and storing the token: every later conversion of the thread would count as a part of the one that failed.

    Returns:
        What the steps return.
    """

    def run() -> T:
        variable.set(value)
        return steps()

    return copy_context().run(run)
