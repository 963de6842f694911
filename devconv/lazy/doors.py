"""What one may do with a single lazy tensor: the conversions of torch's own list, and those that it left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from devconv import flag

from .pending import make_lazy, target_of

__all__ = ["stay_lazy"]


def stay_lazy(stock: Any) -> Any:
    """``__torch_function__`` of lazy tensors: a conversion gives a lazy tensor, where torch gives an empty one.

    ``requires_grad_`` works in place. ``bfloat16``, ``type`` and ``requires_grad_`` raise in stock torch.
    """

    def __torch_function__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N807 - it is one
        if not flag.active():
            return stock.__get__(None, cls)(func, types, args, kwargs)
        kwargs = kwargs or {}
        if func is Tensor.requires_grad_:
            args[0].requires_grad = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            return args[0]
        if func in _CONVERSIONS:
            device, dtype = target_of(args[0])
            moved = _converted(func, device, dtype, args[1:], kwargs)
            if isinstance(moved, Tensor):
                return args[0] if (moved.device, moved.dtype) == (device, dtype) else _like(args[0], moved)
            return moved
        return stock.__get__(None, cls)(func, types, args, kwargs)

    return classmethod(__torch_function__)


_CONVERSIONS = frozenset(
    getattr(Tensor, name)
    for name in ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "char", "short", "int", "long", "type")
)


def _converted(func: Any, device: torch.device, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """What a conversion makes of an empty tensor; a lazy one may leave meta, since it has no values to miss."""
    try:
        return func(torch.empty(0, dtype=dtype, device=device), *args, **kwargs)
    except NotImplementedError:
        if device.type != "meta":
            raise
        # Only a move to a named device is refused there, and that ends on the same device from anywhere.
        return func(torch.empty(0, dtype=dtype), *args, **kwargs)


def _like(tensor: Tensor, moved: Tensor) -> Tensor:
    made = make_lazy(type(tensor), tensor.requires_grad, moved.device, moved.dtype)
    made.__dict__.update(tensor.__dict__)
    return made
