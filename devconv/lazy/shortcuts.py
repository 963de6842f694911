"""Output shapes of the operations that large models are made of, without torch's meta kernels.

Several of those kernels are Python that decomposes the operation into dozens of others, which took most of the time of
following a transformer; those of convolutions and batch norms also import torch's compiler, which takes seconds and more
memory than a ResNet. A shortcut answers only where it is sure; everything else, also every wrong call, goes the long way
and fails there with torch's own message.
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
    if rule in _KEEP_STRIDES and not args[0].is_contiguous():
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


def _batch_norm(
    x: Tensor, mean: Any = None, var: Any = None, weight: Any = None, bias: Any = None, *rest: Any, **more: Any
) -> Tensor | None:
    training = rest[0] if rest else more.get("training", False)
    if x.dim() < 2 or (training and x.numel() <= x.shape[1]) or (mean is None and not training):
        return None
    if any(vector is not None and vector.shape != x.shape[1:2] for vector in (mean, var, weight, bias)):
        return None
    return _empty(x.shape, x)


def _convolution(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
    **rest: Any,
) -> Tensor | None:
    if rest or not isinstance(weight, Tensor) or weight.dtype != x.dtype or weight.dim() != x.dim():
        return None
    # In any other memory format of the two the result has that format.
    if not weight.is_contiguous() or isinstance(padding, str) or weight.shape[0] % groups:
        return None
    if x.shape[1] != weight.shape[1] * groups or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    sizes = _windows(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    return None if sizes is None else _empty((x.shape[0], weight.shape[0], *sizes), x)


def _windows(sizes: Sequence[int], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> list[int] | None:
    """How often a window fits into each dimension; None if it does not, or the numbers are not as torch wants them."""
    spread = [(value,) * len(sizes) if isinstance(value, int) else value for value in (stride, padding, dilation)]
    if any(len(values) != len(sizes) for values in (kernel, *spread)):
        return None
    counts = [
        (size + 2 * pad - gap * (width - 1) - 1) // step + 1
        for size, width, step, pad, gap in zip(sizes, kernel, *spread, strict=True)
    ]
    return counts if min(counts, default=0) > 0 else None


def _max_pool(dims: int) -> Callable[..., Tensor | None]:
    def pool(
        x: Tensor,
        kernel_size: Any = None,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: Any = False,
        return_indices: Any = False,
        **rest: Any,
    ) -> Tensor | None:
        kernel = (kernel_size,) * dims if isinstance(kernel_size, int) else kernel_size
        if rest or ceil_mode or return_indices or not isinstance(kernel, tuple) or x.dim() != dims + 2:
            return None
        pads = (padding,) * dims if isinstance(padding, int) else padding
        if not x.numel() or any(pad > width // 2 for pad, width in zip(pads, kernel, strict=False)):
            return None
        sizes = _windows(x.shape[2:], kernel, stride or kernel, padding, dilation)
        return None if sizes is None else _empty((*x.shape[:2], *sizes), x)

    return pool


def _adaptive_pool(dims: int) -> Callable[..., Tensor | None]:
    def pool(x: Tensor, output_size: Any = None, **rest: Any) -> Tensor | None:
        wanted = (output_size,) * dims if isinstance(output_size, int) else output_size
        if rest or not isinstance(wanted, tuple) or len(wanted) != dims or x.dim() != dims + 2:
            return None
        sizes = [here if size is None else size for size, here in zip(wanted, x.shape[2:], strict=True)]
        return _empty((*x.shape[:2], *sizes), x) if x.numel() and min(sizes) > 0 else None

    return pool


def _mean(x: Tensor, dim: Any = None, keepdim: Any = False, **rest: Any) -> Tensor | None:
    chosen = (dim,) if isinstance(dim, int) else dim
    if rest or not isinstance(chosen, tuple | list) or not chosen or not isinstance(keepdim, bool):
        return None
    gone = {number + x.dim() if number < 0 else number for number in chosen}
    if len(gone) != len(chosen) or not gone <= set(range(x.dim())):
        return None
    kept = [1 if number in gone else size for number, size in enumerate(x.shape) if keepdim or number not in gone]
    return _empty(kept, x)


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


_ADAPTIVE_POOLS = tuple(_adaptive_pool(dims) for dims in (1, 2, 3))
_MAX_POOLS = tuple(_max_pool(dims) for dims in (1, 2, 3))

_RULES: dict[Any, Callable[..., Tensor | None]] = {
    functional.embedding: _embedding,
    functional.linear: _linear,
    functional.layer_norm: _norm,
    functional.rms_norm: _norm,
    functional.scaled_dot_product_attention: _attention,
    functional.batch_norm: _batch_norm,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    functional.adaptive_avg_pool1d: _ADAPTIVE_POOLS[0],
    functional.adaptive_avg_pool2d: _ADAPTIVE_POOLS[1],
    functional.adaptive_avg_pool3d: _ADAPTIVE_POOLS[2],
    functional.max_pool1d: _MAX_POOLS[0],
    functional.max_pool2d: _MAX_POOLS[1],
    functional.max_pool3d: _MAX_POOLS[2],
    torch.mean: _mean,
    Tensor.mean: _mean,
    functional.gelu: _elementwise,
    functional.relu: _elementwise,
    torch.relu: _elementwise,
    functional.silu: _elementwise,
    functional.dropout: _elementwise,
    Tensor.add: _same,
    Tensor.mul: _same,
    torch.add: _same,
    torch.mul: _same,
}

_KEEP_STRIDES = frozenset({_elementwise, _same, _batch_norm, _convolution, _mean, *_ADAPTIVE_POOLS, *_MAX_POOLS})
