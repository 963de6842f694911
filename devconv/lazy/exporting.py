"""``torch.export`` of lazy modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from devconv import flag

from .materialization import fill
from .pending import pending_modules

__all__ = ["materialize_first"]


def materialize_first(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.export.export``, whose default mode looks at parameters before it calls the module."""

    @functools.wraps(stock)
    def export(mod: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        if flag.active() and isinstance(mod, nn.Module) and pending_modules(mod):
            fill(mod, tuple(args), dict(kwargs or {}), "device", None)
        return stock(mod, args, kwargs, **options)

    return export
