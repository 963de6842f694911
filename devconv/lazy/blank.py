"""Modules made for their shapes alone: initial values are not drawn, and torch's slow kernels for them not started."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Blank", "draws"]

_FILLS = frozenset({Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_})


def draws(func: Any) -> bool:
    """Whether a torch function only gives its first argument initial values."""
    return func in _FILLS or getattr(func, "__module__", None) == "torch.nn.init"


class Blank(TorchFunctionMode):
    """While it is on, nothing gets initial values."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
