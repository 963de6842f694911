"""One replica: the Python side of a module, into which tensors are put for one call and taken out after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, gt, setitem
from sys import getrefcount
from typing import Any

from torch import Tensor, nn

from devconv import torch_internals as internals

from .attributes import Translator
from .structure import Structure

__all__ = ["Skeleton", "TableMaker"]

_attributes_of = attrgetter("__dict__")


class Skeleton:
    """A copy of every module of a structure, without tensors.

    What a forward pass writes on a replica (attributes, buffers, children) is undone when the replica is stripped, so
    a replica that is used again starts as a new one would. Copies are shallow, as torch's own replicas are: an object
    that is neither a module nor a tensor is shared with the original.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._self_copying = set(structure.self_copying)
        self._modules: list[nn.Module] = [
            internals.bare_replica(module) if i in self._self_copying else type(module).__new__(type(module))
            for i, module in enumerate(structure.modules)
        ]
        count = len(self._modules)
        make = TableMaker()
        tables = list(map(internals.tables_of, structure.modules))
        self._parameters = [make(parameters) for parameters, _, _ in tables]
        self._buffers = [make(buffers) for _, buffers, _ in tables]
        self._replicas = dict(zip(map(id, structure.modules), self._modules, strict=True))
        self._children = [self._children_of(i) for i in range(count)]
        self._families = [children for children in self._children if children]
        self._tables = list(chain.from_iterable(zip(self._parameters, self._buffers, strict=True)))
        self._slot_tables = [self._tables[home] for home in structure.slot_homes]
        # Families tell by their versions, empty tables by being filled: only the others have to be measured.
        self._empty = [table for table in self._tables + self._children if not table]
        self._filled = [table for table in self._tables if table]
        self._lengths = list(map(len, self._filled))
        # Their attributes hold tensors or copies of their own while the replica is in use.
        self._unsteady = {*structure.plain, *structure.setting, *self._self_copying}
        for i, (replica, original) in enumerate(zip(self._modules, structure.modules, strict=True)):
            self._dress(i, replica.__dict__ if i in self._self_copying else dict(original.__dict__))
        self._record()
        self._holders: list[int] | None = None
        self.stale: set[int] = set()
        """Indices of modules whose original has other plain attributes than this replica."""

    def _children_of(self, i: int) -> dict[str, Any]:
        children = internals.children_of(self._structure.modules[i])
        return {key: None if child is None else self._replicas[id(child)] for key, child in children.items()}

    def _lay_out(self) -> None:
        """Give every table its keys, in the originals' order."""
        for i, module in enumerate(self._structure.modules):
            for table, original in zip(
                (self._parameters[i], self._buffers[i]), internals.tables_of(module), strict=False
            ):
                table.clear()
                if original:
                    table.update(dict.fromkeys(original))

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

    def _record(self) -> None:
        """Remember the state to which `strip` goes back."""
        self._attributes = list(map(_attributes_of, self._modules))
        self._attribute_holders = list(map(getrefcount, self._attributes))
        self._attribute_versions = internals.dict_versions(self._attributes) or []
        self._family_versions = internals.dict_versions(self._families) or []

    def _redo(self, indices: Iterable[int]) -> None:
        """Give replicas fresh copies of the originals' attributes, and remember them."""
        indices = list(indices)
        for i in indices:
            original = self._structure.modules[i]
            self._dress(i, dict((internals.bare_replica(original) if i in self._self_copying else original).__dict__))
        renewed = [self._modules[i].__dict__ for i in indices]
        for i, attributes in zip(indices, renewed, strict=True):
            self._attributes[i] = attributes
        del attributes
        holders = list(map(getrefcount, renewed))
        for i, count, version in zip(indices, holders, internals.dict_versions(renewed) or (), strict=False):
            # `renewed` is a holder that goes away.
            self._attribute_holders[i] = count - 1
            self._attribute_versions[i] = version

    def bind(self, tensors: Sequence[Tensor], plain: Mapping[int, Tensor]) -> None:
        """Put one call's tensors in.

        Args:
            tensors: for every place of the structure, the tensor that this replica has there.
            plain: for tensors that are no parameters or buffers, by the original's id, what this replica has instead.
        """
        structure = self._structure
        if self.stale:
            self._redo(self.stale)
            self.stale.clear()
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
        return list(map(getrefcount, self._modules))

    def is_free(self) -> bool:
        """Whether nobody holds one of the replica's modules any more.

        A checkpoint that will run a part of the forward pass again, a hook's list, the frames of a traceback: each
        holds a module that must keep its tensors, and counts as a holder.
        """
        if self._holders is None:
            return True
        now = self._count_holders()
        return now == self._holders or not any(map(gt, now, self._holders))

    def strip(self) -> None:
        """Take the tensors out, and undo what the forward pass wrote on the modules."""
        _exhaust(map(setitem, self._slot_tables, self._structure.slot_keys, repeat(None)))
        for home, key in self._structure.absent if self._unsteady else ():
            self._tables[home][key] = None
        if (
            any(self._empty)
            or list(map(len, self._filled)) != self._lengths
            or internals.dict_versions(self._families) != self._family_versions
        ):
            self._lay_out()
            for i, children in enumerate(self._children):
                children.clear()
                children.update(self._children_of(i))
            self._family_versions = internals.dict_versions(self._families) or []
        written = set(self._unsteady)
        if list(map(getrefcount, self._attributes)) != self._attribute_holders:
            # Somebody holds a module's dict, or a forward pass gave a module another one: look at every module.
            now = map(_attributes_of, self._modules)
            written.update(i for i, (new, old) in enumerate(zip(now, self._attributes, strict=True)) if new is not old)
        versions = internals.dict_versions(self._attributes)
        if versions != self._attribute_versions:
            pairs = zip(versions or (), self._attribute_versions, strict=False)
            written.update(i for i, (new, old) in enumerate(pairs) if new != old)
        if written:
            self._redo(written)


class TableMaker:
    """Makes tables with given keys and no values.

    Python keeps the keys of attribute dicts once for each class, so tables that are attribute dicts have their values
    side by side and nothing else: filling thousands of them touches half the memory, which is what it takes time for.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[str, ...], type] = {}

    def __call__(self, keys: Iterable[str]) -> dict[str, Any]:
        names = tuple(keys)
        if not names:
            return {}
        if names not in self._classes:
            self._classes[names] = type("Table", (), {})
        table: dict[str, Any] = self._classes[names]().__dict__
        # One by one and in order: that is what makes the keys shared.
        for name in names:
            table[name] = None
        return table


def _exhaust(steps: map[Any]) -> None:
    deque(steps, maxlen=0)
