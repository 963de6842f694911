"""What the plain attributes of a module hold: modules and tensors in lists, tuples and dicts, and bound methods.

A replica shares its plain attributes with the original, except where that would lead back to the original's tensors:
those attributes are translated, one by one, into what they mean for the replica.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from devconv import torch_internals as internals

__all__ = ["Plain", "Translator", "look"]

_ATOMS = frozenset(
    {int, float, bool, complex, str, bytes, NoneType, type, FunctionType, BuiltinFunctionType}
    | {torch.Size, torch.dtype, torch.device}
)


class Plain(NamedTuple):
    """What the plain attributes of one module hold.

    Attributes:
        keys: attributes that mean something else for a replica.
        modules: modules that stand in plain containers, with their paths.
        tensors: tensors that are attributes or stand in plain containers.
        containers: lists and dicts, whose contents may change without a sign on the module.
        owning: ids of the containers that hold something of the above.
    """

    keys: tuple[str, ...] = ()
    modules: tuple[tuple[nn.Module, str], ...] = ()
    tensors: tuple[Tensor, ...] = ()
    containers: tuple[list[Any] | dict[Any, Any], ...] = ()
    owning: frozenset[int] = frozenset()

    def same_layout(self, other: Plain) -> bool:
        """Whether replicas made for `other` serve this one too: only tensors differ."""
        return self.keys == other.keys and [id(module) for module, _ in self.modules] == [
            id(module) for module, _ in other.modules
        ]


_NOTHING = Plain()


def look(attributes: dict[str, Any]) -> Plain:
    """What a module's ``__dict__`` holds beside its tables."""
    # Most attributes are numbers, strings and torch's own tables: they are passed over before anything is allocated.
    keys = [key for key, value in attributes.items() if type(value) not in _ATOMS and key not in internals.PLAIN_MODULE]
    if not keys:
        return _NOTHING
    search = _Search()
    owning = tuple(key for key in keys if search.enter(attributes[key], key))
    return Plain(
        owning,
        tuple(search.modules),
        tuple(search.tensors),
        tuple(search.containers),
        frozenset(key for key, own in search.seen.items() if own),
    )


class _Search:
    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, str]] = []
        self.tensors: list[Tensor] = []
        self.containers: list[list[Any] | dict[Any, Any]] = []
        self.seen: dict[int, bool] = {}

    def enter(self, value: Any, path: str) -> bool:
        """Whether a replica needs its own version of `value`."""
        if type(value) in _ATOMS:
            return False
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return True
        if isinstance(value, nn.Module):
            self.modules.append((value, path))
            return True
        if isinstance(value, MethodType):
            # Rebound if its module is replicated anyway; a method alone does not pull a foreign module in.
            return isinstance(value.__self__, nn.Module)
        if isinstance(value, partial):
            return self._any([*value.args, *value.keywords.values(), value.func], path)
        if not isinstance(value, list | tuple | dict):
            return False
        if id(value) not in self.seen:
            self.seen[id(value)] = False
            if not isinstance(value, tuple):
                self.containers.append(value)
            self.seen[id(value)] = self._any(list(_items(value)), path)
        return self.seen[id(value)]

    def _any(self, items: list[Any], path: str) -> bool:
        found = [self.enter(item, f"{path}[{position}]") for position, item in enumerate(items)]
        return any(found)


def _items(container: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)


class Translator:
    """Turns attributes of the originals into those of one replica. Containers that several share stay shared."""

    def __init__(self, modules: Mapping[int, nn.Module], tensors: Mapping[int, Tensor]) -> None:
        self._modules, self._tensors = modules, tensors
        self._made: dict[int, Any] = {}

    def translate(self, value: Any, owning: frozenset[int]) -> Any:
        """`value` with every known module and tensor replaced; what holds none is the same object.

        Args:
            value: an attribute's value, or something in it.
            owning: ids of the containers that hold a module or tensor.
        """
        if isinstance(value, Tensor):
            return self._tensors.get(id(value), value)
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, MethodType):
            owner = self._modules.get(id(value.__self__))
            return value if owner is None else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            args = [self.translate(item, owning) for item in value.args]
            keywords = {key: self.translate(item, owning) for key, item in value.keywords.items()}
            made = type(value)(self.translate(value.func, owning), *args, **keywords)
            made.__dict__.update(value.__dict__)
            return made
        if id(value) not in owning:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._container(value, owning)
        return self._made[id(value)]

    def _container(self, value: Any, owning: frozenset[int]) -> Any:
        if isinstance(value, tuple):
            items = [self.translate(item, owning) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        made = copy.copy(value)
        # Before its contents: a list may hold itself.
        self._made[id(value)] = made
        if isinstance(made, dict):
            for key, item in value.items():
                made[key] = self.translate(item, owning)
        else:
            made[:] = [self.translate(item, owning) for item in value]
        return made
