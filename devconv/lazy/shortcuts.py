"""Output shapes of the operations that large models are made of, without torch's meta kernels.

Several of those kernels are Python that decomposes the operation into dozens of others, which took most of the time of
following a transformer. A shortcut answers only where it is sure; everything else, also every wrong call, goes the long
way and fails there with torch's own message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["shortcut"]


def shortcut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of ``func(*args, **kwargs)`` for meta tensors; None where torch has to be asked."""
    rule = _RULES.get(func)
    if rule is None or not args or not isinstance(args[0], Tensor) or _autocast_is_on():
        return None
    if rule is not _embedding and not args[0].is_floating_point():
        return None
    if rule in (_elementwise, _same) and not args[0].is_contiguous():
        # Their results keep the strides of their inputs.
        return None
    return rule(*args, **kwargs)


def _autocast_is_on() -> bool:
    """Under autocast results have other dtypes."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("xla")


def _linear(x: Tensor, weight: Any = None, bias: Any = None, **rest: Any) -> Tensor | None:
    if rest or not isinstance(weight, Tensor) or weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return None
    if weight.dtype != x.dtype or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return _empty((*x.shape[:-1], weight.shape[0]), x)


def _norm(x: Tensor, shape: Any = None, weight: Any = None, bias: Any = None, *rest: Any, **more: Any) -> Tensor | None:
    del rest, more
    if not shape or tuple(x.shape[-len(shape) :]) != tuple(shape):
        return None
    if any(isinstance(vector, Tensor) and tuple(vector.shape) != tuple(shape) for vector in (weight, bias)):
        return None
    return _empty(x.shape, x)


def _attention(query: Tensor, key: Any = None, value: Any = None, *more: Any, **rest: Any) -> Tensor | None:
    del more
    plain = isinstance(key, Tensor) and isinstance(value, Tensor) and not rest.get("enable_gqa")
    if not plain or not 3 <= query.dim() == key.dim() == value.dim():
        return None
    fits = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and query.shape[-1] == key.shape[-1]
    if not fits or key.shape[-2] != value.shape[-2]:
        return None
    return _empty((*query.shape[:-1], value.shape[-1]), query)


def _elementwise(x: Tensor, *rest: Any, inplace: bool = False, **more: Any) -> Tensor | None:
    del rest, more
    return None if inplace else _empty(x.shape, x)


def _same(x: Tensor, other: Any = None, **rest: Any) -> Tensor | None:
    if rest:
        return None
    if isinstance(other, Tensor):
        return _empty(x.shape, x) if other.shape == x.shape and other.dtype == x.dtype else None
    return _empty(x.shape, x) if isinstance(other, int | float) and not isinstance(other, bool) else None


def _embedding(indices: Tensor, weight: Any = None, *rest: Any, **more: Any) -> Tensor | None:
    del rest, more
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return _empty((*indices.shape, weight.shape[1]), weight) if indices.dtype in (torch.int64, torch.int32) else None


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    # Not empty_like, nor new_empty: they are Python on meta too.
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    functional.embedding: _embedding,
    functional.linear: _linear,
    functional.layer_norm: _norm,
    functional.rms_norm: _norm,
    functional.scaled_dot_product_attention: _attention,
    functional.gelu: _elementwise,
    functional.silu: _elementwise,
    functional.dropout: _elementwise,
    Tensor.add: _same,
    Tensor.mul: _same,
    torch.add: _same,
    torch.mul: _same,
}
