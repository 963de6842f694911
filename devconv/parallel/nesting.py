"""Tensors in nested inputs and outputs, with the path that leads to each."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Whole", "leaves", "parts", "rebuild", "remake"]


class Whole:
    """An argument that every replica of a `DataParallel` gets whole, on its own device.

    Without it a tensor is cut along the batch dimension, and one of another size than the batch is an error.

    >>> Whole(5).value
    5
    """

    def __init__(self, value: Any) -> None:
        """Wrap an argument.

        Args:
            value: a tensor or any nesting of tensors.
        """
        self.value = value


def parts(value: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, with the path of each part from it; None for anything that is no container."""
    if isinstance(value, Whole):
        return [("", value.value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, PackedSequence):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"[{position}]", item) for position, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
    return None


def remake(value: Any, items: list[Any]) -> Any:
    """A container of the kind of `value` that holds other parts; `Whole` gives the part itself."""
    if isinstance(value, Whole):
        return items[0]
    if isinstance(value, MutableMapping):
        # A copy keeps what the class adds: a default factory, attributes.
        made = copy.copy(value)
        for key, item in zip(value, items, strict=True):
            made[key] = item
        return made
    if isinstance(value, Mapping):
        return type(value)(dict(zip(value, items, strict=True)))  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, list | tuple):
        return type(value)(items)
    names = [field.name for field in dataclasses.fields(value) if field.init]
    return dataclasses.replace(value, **dict(zip(names, items, strict=True)))


def leaves(value: Any, path: str = "", *, whole: bool = False) -> Iterator[tuple[str, Tensor, bool]]:
    """Every tensor in `value` in order: its path, itself, and whether it stands in a `Whole`."""
    if isinstance(value, Tensor):
        yield path, value, whole
        return
    for step, item in parts(value) or ():
        yield from leaves(item, path + step, whole=whole or isinstance(value, Whole))


def rebuild(value: Any, tensors: Iterator[Tensor]) -> Any:
    """`value` with other tensors, taken in the order of `leaves`. What holds no tensor is the same object."""
    if isinstance(value, Tensor):
        return next(tensors)
    held = parts(value)
    if held is None:
        return value
    items = [rebuild(item, tensors) for _, item in held]
    if not isinstance(value, Whole) and all(new is old for new, (_, old) in zip(items, held, strict=True)):
        return value
    return remake(value, items)
