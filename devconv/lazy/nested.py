"""Tensors inside the inputs of a model: tuples, lists, dicts, named tuples, dataclasses, packed sequences, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .spec import TensorSpec

__all__ = ["map_tensors", "tensors_in"]

Leaf = Tensor | TensorSpec


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every tensor and `TensorSpec` in it replaced by ``change(leaf)``; containers are new objects.

    Args:
        value: any nesting of containers; objects of other kinds are kept as they are.
        change: from a leaf to its replacement.

    Returns:
        The same structure.

    >>> map_tensors({"a": [TensorSpec((2, 3)), 1]}, lambda spec: spec.shape)
    {'a': [(2, 3), 1]}
    """
    if isinstance(value, Leaf):
        return change(value)
    if isinstance(value, PackedSequence):
        # Its batch sizes belong on the CPU wherever the data is.
        orders = [None if order is None else change(order) for order in value[2:]]
        return PackedSequence(change(value.data), value.batch_sizes, *orders)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)([map_tensors(item, change) for item in value])
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        for key, item in value.items():
            clone[key] = map_tensors(item, change)
        return clone
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, map_tensors(getattr(value, field.name), change))
        return twin
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in order. Of a packed sequence the data only: its indices may be on another device."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
