"""Moving nested inputs: a batch of tensors in lists, tuples, dicts, dataclasses."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from .staging import transmit
from .transfer import Transfer

__all__ = ["move_nested", "replace_tensors"]

T = TypeVar("T")


def move_nested(value: T, device: torch.device, dtype: torch.dtype | None, non_blocking: bool) -> T:
    """Every tensor in `value` on `device`, in as few calls of the backends as possible."""
    transfer = Transfer(device, dtype, "inexact", non_blocking=non_blocking)
    found: dict[int, Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        found[id(tensor)] = tensor
        return tensor

    replace_tensors(value, collect, lambda other: other)
    moved: dict[int, Tensor] = {}
    batches: dict[torch.device, list[Tensor]] = defaultdict(list)
    for key, tensor in found.items():
        if tensor.device == device and transfer.dtype_for(tensor.dtype) is tensor.dtype:
            moved[key] = tensor
        elif _is_batched(tensor):
            batches[tensor.device].append(tensor)
        else:
            moved[key] = transfer.apply(tensor)
    for source, tensors in batches.items():
        dtypes = [transfer.dtype_for(tensor.dtype) for tensor in tensors]
        for tensor, copy in zip(
            tensors, transmit(tensors, source, device, dtypes, non_blocking=non_blocking), strict=True
        ):
            moved[id(tensor)] = copy

    def convert(other: Any) -> Any:
        # PackedSequence, and the batches of many data libraries.
        return other.to(device) if dtype is None else other.to(device, dtype)

    return replace_tensors(value, lambda tensor: moved[id(tensor)], convert)


def _is_batched(tensor: Tensor) -> bool:
    # A graph goes through the copy, a subclass has its own idea of one, and sparse tensors have no storage.
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) is Tensor and strided and not tensor.requires_grad


def replace_tensors(value: T, replace: Callable[[Tensor], Tensor], convert: Callable[[Any], Any]) -> T:
    """`value` rebuilt with other tensors; what holds no tensor is returned as it is.

    Args:
        value: a tensor, or lists, tuples, named tuples, mappings and dataclasses of them.
        replace: called for every tensor.
        convert: called for any other object with a ``to`` method.
    """
    # Not an inner function that calls itself: one would keep every tensor until Python's cyclic collector comes.
    item: Any = value
    walk = functools.partial(replace_tensors, replace=replace, convert=convert)
    made: Any = item
    if isinstance(item, Tensor):
        made = replace(item)
    elif isinstance(item, torch.nn.utils.rnn.PackedSequence):
        made = convert(item)
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        made = type(item)(*map(walk, item))
    elif isinstance(item, list | tuple):
        made = type(item)(map(walk, item))
    elif isinstance(item, dict):
        made = item.copy()
        made.update((key, walk(inner)) for key, inner in item.items())
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = {field.name: walk(getattr(item, field.name)) for field in dataclasses.fields(item) if field.init}
        made = dataclasses.replace(item, **fields)
    elif callable(getattr(item, "to", None)) and not isinstance(item, torch.nn.Module):
        made = convert(item)
    elif isinstance(item, Mapping):
        made = type(item)({key: walk(inner) for key, inner in item.items()})  # type: ignore[call-arg]
    return made  # type: ignore[no-any-return]
