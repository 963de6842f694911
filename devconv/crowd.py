"""Tensors that nothing distinguishes but their place, in columns.

A large model has thousands of them and a handful that are special. An object for each, looked at one by one in every
step of a conversion, costs as much as sending them; a column goes through C's own loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor
from torch.nn import Parameter

from . import torch_internals as internals
from .entries import QUANTISED, Decision, Entry, Home, Table

__all__ = ["Crowd"]


_NOWHERE = torch.device("meta"), torch.float32
_COLUMNS = ("tensors", "keys", "owners", "positions", "places", "numels", "contiguous", "storages")


class Crowd:
    """Parameters, or buffers, of torch's own classes: each stands in one place, on a storage of its own, without a
    gradient, and nothing but Python holds it.

    Attributes:
        parameter: they are parameters; plain buffers otherwise.
        homes: ``M`` modules, each with its prefix.
        tables: the table of each module.
        tensors: ``T`` tensors.
        keys: the key of each in its table.
        owners: the place in `homes` and `tables` of the module of each.
        positions: the number of each in the walk.
        places: the device and dtype of each, after `examine`.
        numels: the number of elements of each, after `examine`.
        contiguous: whether each is, after `examine`.
        storages: the address of the storage of each, after `examine`.
        decision: what is to happen to all of them, set by the planner.
        staged: the ``T`` new tensors; after a swap they hold the old TensorImpls.
    """

    decision: Decision

    def __init__(
        self,
        parameter: bool,
        homes: Sequence[Home],
        tables: Sequence[Table],
    ) -> None:
        self.parameter = parameter
        self.homes = homes
        self.tables = tables
        self.tensors: list[Tensor] = []
        self.keys: list[str] = []
        self.owners: list[int] = []
        self.positions: list[int] = []
        self.places: list[tuple[torch.device, torch.dtype]] = []
        self.numels: list[int] = []
        self.contiguous: list[bool] = []
        self.storages: list[int] = []
        self.staged: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.tensors)

    def fill(self, firsts: Iterable[int]) -> Crowd:
        """Take in all that stands in the tables.

        Args:
            firsts: the number of the first tensor of each table in the walk; None counts as one.
        """
        tensors, keys, owners, positions = self.tensors, self.keys, self.owners, self.positions
        for owner, (first, table) in enumerate(zip(firsts, self.tables, strict=True)):
            for position, (key, tensor) in enumerate(table.items(), first):
                if tensor is not None:
                    tensors.append(tensor)
                    keys.append(key)
                    owners.append(owner)
                    positions.append(position)
        return self

    def examine(self) -> set[int]:
        """Look at every tensor, once: thousands of them do not fit into the processor's cache.

        Returns:
            The ids of those that something distinguishes, and of their gradients.
        """
        special: set[int] = set()
        parameter, cls = self.parameter, Parameter if self.parameter else Tensor
        strided, quantised = torch.strided, QUANTISED
        place = device, dtype = _NOWHERE
        known = {place: place}
        use_count, chose_grad_dtype, storage_of = internals.use_count, internals.chose_grad_dtype, internals.storage_of
        for tensor in self.tensors:
            if type(tensor) is not cls or tensor.layout is not strided:
                # Not asked any further: a lazy parameter has no gradient to ask for, a sparse one no storage.
                special.add(id(tensor))
                self.places.append(_NOWHERE)
                self.numels.append(0)
                self.contiguous.append(True)
                self.storages.append(0)
                continue
            grad = tensor.grad
            if tensor.dtype is not dtype or tensor.device != device:
                # One object for all that are in one place: Python's collector counts them.
                place = tensor.device, tensor.dtype
                place = device, dtype = known.setdefault(place, place)
            self.places.append(place)
            self.numels.append(tensor.numel())
            self.contiguous.append(tensor.is_contiguous())
            self.storages.append(storage_of(tensor))
            if grad is not None:
                special.add(id(tensor))
                special.add(id(grad))
            elif (
                (use_count(tensor) != 1 or chose_grad_dtype(tensor)) if parameter else tensor.requires_grad
            ) or dtype in quantised:
                special.add(id(tensor))
        return special

    def where(self, chosen: Iterable[object]) -> Crowd:
        """Those of them for which `chosen`, a value for each, is true."""
        mask = list(chosen)
        part = Crowd(self.parameter, self.homes, self.tables)
        for column in _COLUMNS:
            setattr(part, column, list(compress(getattr(self, column), mask)))
        return part

    def names(self) -> list[str]:
        """Their full names, as in ``named_parameters()``."""
        return [self.homes[owner][1] + key for owner, key in zip(self.owners, self.keys, strict=True)]

    def entries(self) -> list[Entry]:
        """The same as objects, one for each."""
        made = []
        for tensor, key, owner, position in zip(self.tensors, self.keys, self.owners, self.positions, strict=True):
            entry = Entry(tensor, self.homes[owner], self.tables[owner], key)
            entry.position = position
            entry.parameter = self.parameter
            made.append(entry)
        return made

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Let each of ``T`` tensors stand where the crowd's own do."""
        tables = self.tables
        for owner, key, tensor in zip(self.owners, self.keys, tensors, strict=True):
            tables[owner][key] = tensor

    def release(self) -> None:
        """Let go of every tensor and module; a report may go on using the other columns."""
        self.homes, self.tables, self.tensors, self.staged = [], [], [], []
