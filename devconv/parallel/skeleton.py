"""One replica: the Python side of a module, into which tensors are put for one call and taken out after it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, gt, setitem
from typing import Any

from torch import Tensor, nn

from devconv import torch_internals as internals

from .attributes import Translator
from .structure import Structure

__all__ = ["Skeleton"]

_attributes_of = attrgetter("__dict__")


class Skeleton:
    """A copy of every module of a structure, without tensors.

    What a forward pass writes on a replica (attributes, buffers, children) is undone when the replica is stripped, so
    a replica that is used again starts as a new one would. Copies are shallow, as torch's own replicas are: an object
    that is neither a module nor a tensor is shared with the original.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._modules = [internals.bare_replica(module) for module in structure.modules]
        count = len(self._modules)
        self._parameters: list[dict[str, Any]] = [{} for _ in range(count)]
        self._buffers: list[dict[str, Any]] = [{} for _ in range(count)]
        self._children: list[dict[str, Any]] = []
        replicas = dict(zip(map(id, structure.modules), self._modules, strict=True))
        for module in structure.modules:
            children = internals.children_of(module)
            self._children.append(
                {key: None if child is None else replicas[id(child)] for key, child in children.items()}
            )
        homes = list(chain.from_iterable(zip(self._parameters, self._buffers, strict=True)))
        self._slot_tables = [homes[home] for home in structure.slot_homes]
        self._replicas = replicas
        self._self_copying = set(structure.self_copying)
        # Their attributes hold tensors or copies of their own while the replica is in use.
        self._unsteady = {*structure.plain, *structure.setting, *self._self_copying}
        for i, replica in enumerate(self._modules):
            self._dress(i, replica.__dict__)
        self._record()
        self._holders: list[int] | None = None
        self.stale: set[int] = set()
        """Indices of modules whose original has other plain attributes than this replica."""

    @property
    def root(self) -> nn.Module:
        """The replica of the root."""
        return self._modules[0]

    def _dress(self, i: int, attributes: dict[str, Any]) -> None:
        """Make `attributes`, those of the original, the attributes of replica `i`."""
        attributes.update(
            zip(internals.TABLES, (self._parameters[i], self._buffers[i], self._children[i]), strict=True)
        )
        internals.mark_replica(attributes, self._parameters[i])
        plain = self._structure.plain.get(i)
        for key in plain.keys if plain is not None else ():
            attributes.pop(key, None)
        # nn.Module's own __setattr__ would store the dict as an attribute of that name.
        object.__setattr__(self._modules[i], "__dict__", attributes)

    def _undress(self, i: int) -> None:
        original = self._structure.modules[i]
        self._dress(i, dict((internals.bare_replica(original) if i in self._self_copying else original).__dict__))

    def _record(self) -> None:
        self._attribute_versions = internals.dict_versions(list(map(_attributes_of, self._modules)))
        self._children_versions = internals.dict_versions(self._children)

    def bind(self, tensors: Sequence[Tensor | None], plain: Mapping[int, Tensor]) -> None:
        """Put one call's tensors in.

        Args:
            tensors: for every place of the structure, the tensor that this replica has there.
            plain: for tensors that are no parameters or buffers, by the original's id, what this replica has instead.
        """
        structure = self._structure
        if self.stale:
            for i in self.stale:
                self._undress(i)
            self.stale.clear()
            self._record()
        _exhaust(map(setitem, self._slot_tables, structure.slot_keys, tensors))
        if structure.plain:
            self._translate(plain)
        for i in structure.setting:
            for table in (self._parameters[i], self._buffers[i]):
                self._set(self._modules[i], table)
        if self._holders is None or structure.plain:
            self._holders = self._count_holders()

    def _translate(self, plain: Mapping[int, Tensor]) -> None:
        translator = Translator(self._replicas, plain)
        for i, held in self._structure.plain.items():
            originals, attributes = self._structure.modules[i].__dict__, self._modules[i].__dict__
            for key in held.keys:
                attributes[key] = translator.translate(originals[key], held.owning)

    @staticmethod
    def _set(replica: nn.Module, table: dict[str, Any]) -> None:
        """Set tensors through a class's own ``__setattr__``: RNNs keep their flat lists of weights by it."""
        values = dict(table)
        table.clear()
        for key, value in values.items():
            if value is None:
                table[key] = None
                continue
            setattr(replica, key, value)
            # A tensor that is no Parameter became a plain attribute; parameters() of a replica is to find it.
            table[key] = replica.__dict__.pop(key, value)

    def _count_holders(self) -> list[int]:
        return list(map(sys.getrefcount, self._modules))

    def is_free(self) -> bool:
        """Whether nobody holds one of the replica's modules any more.

        A checkpoint that will run a part of the forward pass again, a hook's list, the frames of a traceback: each
        holds a module that must keep its tensors, and counts as a holder.
        """
        return self._holders is None or not any(map(gt, self._count_holders(), self._holders))

    def strip(self) -> None:
        """Take the tensors out, and undo what the forward pass wrote on the modules."""
        _exhaust(map(dict.clear, self._parameters))
        _exhaust(map(dict.clear, self._buffers))
        if internals.dict_versions(self._children) != self._children_versions:
            for original, children in zip(self._structure.modules, self._children, strict=True):
                registered = internals.children_of(original)
                children.clear()
                for key, child in registered.items():
                    children[key] = None if child is None else self._replicas[id(child)]
        versions = internals.dict_versions(list(map(_attributes_of, self._modules)))
        if self._unsteady or versions != self._attribute_versions:
            old, new = self._attribute_versions or (), versions or ()
            written = {i for i, (before, after) in enumerate(zip(old, new, strict=True)) if before != after}
            for i in written | self._unsteady:
                self._undress(i)
        self._record()


def _exhaust(steps: map[Any]) -> None:
    deque(steps, maxlen=0)
