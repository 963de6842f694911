"""The flag's switch, and the table of what of torch's is replaced while it is on.

Every line only calls `conversion` (or, for lazy modules, `lazy`); the table is installed and removed whole.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from . import conversion, flag, following
from . import torch_internals as internals
from .lazy.patches import lazy_patches
from .patches import Patch

__all__ = ["get_registry_conversion", "registry_conversion", "set_registry_conversion"]


def _door(name: str) -> Callable[[Any], Any]:
    def replace(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @functools.wraps(stock)
        def door(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if not flag.active() or conversion.running():
                return stock(self, *args, **kwargs)
            return conversion.through_door(self, name, stock, args, kwargs)

        return door

    return replace


def _table() -> tuple[Patch, ...]:
    doors = (name for name in internals.DOORS if hasattr(nn.Module, name))
    return (
        conversion.APPLY,
        following.BIRTH,
        *(Patch(nn.Module, name, _door(name)) for name in doors),
        *lazy_patches(),
    )


_lock = threading.RLock()
_patches: tuple[Patch, ...] | None = None
_PROCESS = "the process"
"""Who holds the patches while the flag is on for the whole process."""


def _hold(holder: object) -> None:
    global _patches
    with _lock:
        if _patches is None:
            _patches = _table()
        for patch in _patches:
            patch.hold(holder)


def _release(holder: object) -> None:
    with _lock:
        for patch in reversed(_patches or ()):
            patch.release(holder)


def set_registry_conversion(value: bool) -> None:
    """Let every ``nn.Module`` conversion of this process go by the registry, or by stock torch again.

    With the flag on, ``model.to(...)`` and its kin keep what stock torch loses: ties, the identity of parameters,
    gradients, hooks, attributes, optimizers. With it off, ``nn.Module._apply`` is stock torch's own function object.

    Args:
        value: on or off, for the whole process; `registry_conversion` overrides it in one context.

    Raises:
        TypeError: `value` is no bool.

    Source: modelled on ``torch.__future__.set_swap_module_params_on_conversion`` (torch 2.13), whose flags keep their
    meaning while this one is on.
    """
    if not isinstance(value, bool):
        raise TypeError(f"set_registry_conversion() takes a bool, got {type(value).__qualname__}")
    with _lock:
        before = flag.set_process_wide(value)
        if value and not before:
            _hold(_PROCESS)
        elif before and not value:
            _release(_PROCESS)


def get_registry_conversion() -> bool:
    """Whether ``nn.Module`` conversions go by the registry in this thread and context.

    >>> get_registry_conversion()
    False
    """
    return flag.active()


@contextmanager
def registry_conversion(value: bool = True) -> Iterator[None]:
    """Turn the flag on (or off) for the body of a ``with``, in this thread and context alone.

    >>> with registry_conversion():
    ...     get_registry_conversion()
    True
    """
    holder = object()
    try:
        if value:
            _hold(holder)
        with flag.override(value):
            yield
    finally:
        if value:
            _release(holder)
