"""Replacing a function of torch's and putting it back, when the last of its holders lets go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Patch"]

_lock = threading.RLock()


class Patch:
    """One replacement: installed while anybody holds it, and the original's own object again afterwards.

    Args:
        target: the class or module that has the attribute.
        name: the attribute's name.
        replace: makes the replacement from the original.
    """

    def __init__(self, target: Any, name: str, replace: Callable[[Any], Any]) -> None:
        self.target, self.name = target, name
        self._replace = replace
        self._holders: set[object] = set()
        self._original: Any = None
        self._replacement: Any = None
        self._owned = False
        self._installed = False

    @property
    def is_held(self) -> bool:
        """Whether anybody holds it."""
        return bool(self._holders)

    def hold(self, holder: object) -> None:
        """Install the replacement, unless it is.

        Args:
            holder: who holds it, until the same is given to `release`. Not a count: whoever is interrupted in here cannot
                tell whether he holds it already, and releases it in any case.
        """
        with _lock:
            self._holders.add(holder)
            if self._installed:
                return
            if self._replacement is not None and _reaches(vars(self.target).get(self.name), self._replacement):
                # Somebody patched on top of us and kept our replacement: it is still in their chain.
                self._installed = True
                return
            self._owned = self.name in vars(self.target)
            self._original = vars(self.target)[self.name] if self._owned else getattr(self.target, self.name)
            self._replacement = self._replace(self._original)
            setattr(self.target, self.name, self._replacement)
            # Last, and not told by the number of holders: of two, the first may have been interrupted before this.
            self._installed = True

    def release(self, holder: object) -> None:
        """Give up a hold; the last one puts the original back, unless somebody patched on top of the replacement."""
        with _lock:
            self._holders.discard(holder)
            if self._holders:
                return
            self._installed = False
            if self._replacement is None or vars(self.target).get(self.name) is not self._replacement:
                return
            if self._owned:
                setattr(self.target, self.name, self._original)
            else:
                delattr(self.target, self.name)
            self._replacement = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it for the body of a ``with``."""
        holder = object()
        try:
            self.hold(holder)
            yield
        finally:
            self.release(holder)


def _reaches(function: Any, replacement: Any) -> bool:
    """Whether `replacement` is `function`, or is still called by it, as far as can be told: it is not the original."""
    return function is replacement or getattr(function, "__wrapped__", None) is replacement
