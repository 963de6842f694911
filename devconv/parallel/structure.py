"""What replicas of a module were made for, and the cheap question whether it is still so.

A call may change nothing but values, and then thousands of modules must not be looked at one by one. Dicts have a
version number, so the question is answered by comparing two lists of numbers; only what differs is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, islice
from operator import attrgetter, getitem, is_
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn

from devconv import torch_internals as internals
from devconv.errors import UninitializedTensorError

from .attributes import Plain, look
from .refusing import refuse_bound_code, refuse_half_moved

__all__ = ["Structure"]

_attributes_of = attrgetter("__dict__")
_device_of = attrgetter("device")
_is_cpu = attrgetter("is_cpu")
_requires_grad = attrgetter("requires_grad")
_is_cpu_and_requires_grad = attrgetter("is_cpu", "requires_grad")


class Structure:
    """Every module that is reachable from one, every place of a tensor in them, and their state when last seen.

    Attributes:
        modules: each once, the root first.
        names: their full names; ``blocks[0]`` for one that stands in a plain list.
        positions: index in `modules`, by id.
        plain: what their plain attributes hold, where that is anything.
        self_copying: indices of modules that make their own copies.
        setting: indices of modules whose class overrides ``__setattr__``, and wants to see its tensors set.
        slot_homes: for every place of a tensor, twice the index of its module, plus one for a buffer.
        slot_keys: the name in that module's table.
        absent: twice the index of a module, plus one for a buffer, and the name, of every place that holds None.
        tensors: every registered tensor once.
        index: for every place, the position in `tensors`.
        parameter_count: so many of `tensors`, the first ones, stand in a table of parameters.
        tied: some stand in several places; else `index` counts up from 0.
    """

    def __init__(self, root: nn.Module) -> None:
        """Look at everything once.

        Raises:
            ReplicationRefused: a module is compiled or scripted.
            UninitializedTensorError: a tensor is lazy.
        """
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.positions: dict[int, int] = {}
        self._plain: list[Plain] = []
        self._walk(root)
        refuse_bound_code(self.modules, self.names)
        self._types = list(map(type, self.modules))
        self.self_copying = [i for i, module in enumerate(self.modules) if internals.replicates_itself(module)]
        stock_setattr: object = nn.Module.__setattr__
        self.setting = [i for i, cls in enumerate(self._types) if cls.__setattr__ is not stock_setattr]
        self._tables = list(chain.from_iterable(map(internals.tables_of, self.modules)))
        self._layout = [self._layout_of(position) for position in range(len(self._tables))]
        self.slot_homes: list[int] = []
        self.slot_keys: list[str] = []
        self.absent: list[tuple[int, str]] = []
        self._slot_tables: list[dict[str, Tensor]] = []
        for kind in (0, 1):
            for i in range(len(self.modules)):
                table = self._tables[3 * i + kind]
                for key, tensor in table.items():
                    if tensor is None:
                        self.absent.append((2 * i + kind, key))
                        continue
                    self.slot_homes.append(2 * i + kind)
                    self.slot_keys.append(key)
                    self._slot_tables.append(table)
        self._remember()
        self._collect()
        self._watch()

    def _walk(self, root: nn.Module) -> None:
        stack: list[tuple[nn.Module, str]] = [(root, "")]
        hidden: list[tuple[nn.Module, str]] = []
        while stack or hidden:
            # Registered modules first: theirs is the name that people know.
            module, name = stack.pop() if stack else hidden.pop(0)
            if id(module) in self.positions:
                continue
            self.positions[id(module)] = len(self.modules)
            self.modules.append(module)
            self.names.append(name)
            plain = look(module.__dict__)
            self._plain.append(plain)
            prefix = f"{name}." if name else ""
            children = [
                (child, prefix + key) for key, child in internals.children_of(module).items() if child is not None
            ]
            stack.extend(reversed(children))
            hidden.extend((other, prefix + path) for other, path in plain.modules)

    def _layout_of(self, position: int) -> tuple[Any, ...]:
        table = self._tables[position]
        if position % 3 == 2:
            return tuple((key, id(child)) for key, child in table.items())
        return tuple((key, tensor is None) for key, tensor in table.items())

    def _remember(self) -> None:
        self._attributes = list(map(_attributes_of, self.modules))
        self._holders = list(map(getrefcount, self._attributes))
        self._attribute_versions = internals.dict_versions(self._attributes)
        # Most tables are empty, and whether they still are is asked at a fraction of a version's price.
        self._filled = [position for position, table in enumerate(self._tables) if table]
        self._empty_tables = [table for table in self._tables if not table]
        self._filled_tables = [self._tables[position] for position in self._filled]
        self._table_versions = internals.dict_versions(self._filled_tables)

    def _collect(self) -> None:
        objects = list(map(getitem, self._slot_tables, self.slot_keys))
        seen: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.index: list[int] = []
        self.parameter_count = 0
        for home, tensor in zip(self.slot_homes, objects, strict=True):
            position = seen.setdefault(id(tensor), len(self.tensors))
            if position == len(self.tensors):
                self.tensors.append(tensor)
                self.parameter_count += not home % 2
            self.index.append(position)
        self.tied = len(self.tensors) < len(objects)
        if any(map(internals.is_lazy_class, set(map(type, self.tensors)))):
            names = [name for name, tensor in self.named() if internals.is_lazy_class(type(tensor))]
            raise UninitializedTensorError(
                names, "replicating a module", "Run a forward pass, or devconv.materialize(model, *inputs), before."
            )

    def _watch(self) -> None:
        self.plain = {i: plain for i, plain in enumerate(self._plain) if plain.keys}
        self._watching = [i for i, plain in enumerate(self._plain) if plain.containers]
        containers = [container for i in self._watching for container in self._plain[i].containers]
        self._views: list[Collection[Any]] = [
            container.values() if isinstance(container, dict) else container for container in containers
        ]
        self._lengths = list(map(len, self._views))
        self._contents = list(chain.from_iterable(self._views))

    def extras(self, device: torch.device | None) -> list[Tensor]:
        """Tensors of plain attributes that are on `device` and not registered too."""
        if not self.plain:
            return []
        registered = set(map(id, self.tensors))
        found = {id(tensor): tensor for plain in self.plain.values() for tensor in plain.tensors}
        return [tensor for key, tensor in found.items() if key not in registered and tensor.device == device]

    def stale(self) -> set[int] | None:
        """What has changed since the last call.

        Returns:
            Indices of modules whose plain attributes changed, empty for most calls; None if replicas have to be made
            anew. New tensors in known places are taken up, and are no reason for either.

        Raises:
            UninitializedTensorError: a new tensor is lazy.
        """
        if self._attribute_versions is None or self._table_versions is None:
            return None
        if list(map(type, self.modules)) != self._types:
            return None
        if list(map(getrefcount, self._attributes)) != self._holders:
            # A module that lets go of its dict for another one shows in the count of the dict's holders, in a third of
            # the time that asking every module takes.
            self._attributes = list(map(_attributes_of, self.modules))
            self._holders = list(map(getrefcount, self._attributes))
        versions = internals.dict_versions(self._attributes)
        assert versions is not None
        changed: set[int] = set()
        if versions != self._attribute_versions:
            changed = {
                i for i, (new, old) in enumerate(zip(versions, self._attribute_versions, strict=True)) if new != old
            }
            if not all(self._same_tables(i) for i in changed):
                return None
        looked = changed.union(self._watching) if self._contents_changed() else changed
        if looked and not self._look_again(looked):
            return None
        if any(self._empty_tables):
            return None
        tables = internals.dict_versions(self._filled_tables)
        assert tables is not None
        if tables != self._table_versions:
            for position, new, old in zip(self._filled, tables, self._table_versions, strict=True):
                if new != old and self._layout_of(position) != self._layout[position]:
                    return None
            self._collect()
        self._attribute_versions, self._table_versions = versions, tables
        return changed

    def _same_tables(self, i: int) -> bool:
        tables = internals.tables_of(self.modules[i])
        return all(map(is_, tables, self._tables[3 * i : 3 * i + 3]))

    def _contents_changed(self) -> bool:
        return list(map(len, self._views)) != self._lengths or not all(
            map(is_, chain.from_iterable(self._views), self._contents)
        )

    def _look_again(self, indices: set[int]) -> bool:
        for i in indices:
            module = self.modules[i]
            plain = look(module.__dict__)
            if not plain.same_layout(self._plain[i]) or internals.is_compiled(module):
                return False
            if (i in self.self_copying) != internals.replicates_itself(module):
                return False
            self._plain[i] = plain
        self._watch()
        return True

    def state(self) -> tuple[torch.device | None, bool]:
        """What may change in a tensor without a sign on its module.

        Returns:
            The one device that all registered tensors are on, None if there are none; and whether a buffer requires a
            gradient.

        Raises:
            ReplicationRefused: tensors are on more than one device.
        """
        known = self.parameter_count
        if self.tensors and self.tensors[0].is_cpu and all(map(_is_cpu, islice(self.tensors, known))):
            # A type without indices: the flag says it all, and is read in a third of the time. Both questions at once,
            # because most of the time goes into fetching thousands of tensors from memory.
            found = set(map(_is_cpu_and_requires_grad, islice(self.tensors, known, None)))
            if all(here for here, _ in found):
                return self.tensors[0].device, any(tracked for _, tracked in found)
        devices = set(map(_device_of, self.tensors))
        if len(devices) > 1:
            refuse_half_moved(self.named())
        return devices.pop() if devices else None, any(map(_requires_grad, islice(self.tensors, known, None)))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every place of a tensor: the full name, and the tensor."""
        for home, key, position in zip(self.slot_homes, self.slot_keys, self.index, strict=True):
            prefix = self.names[home // 2]
            yield f"{prefix}.{key}" if prefix else key, self.tensors[position]
