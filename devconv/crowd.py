"""Tensors that nothing distinguishes but their place, in columns.

A large model has thousands of them and a handful that are special. An object for each, looked at one by one in every
step of a conversion, costs as much as sending them; a column goes through C's own loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
from operator import add, itemgetter, methodcaller

import torch
from torch import Tensor
from torch.nn import Parameter

from . import torch_internals as internals
from .entries import QUANTISED, Decision, Entry, Home, Table

__all__ = ["Crowd"]


_NONE = id(None)
_NOWHERE = torch.device("meta")
_COLUMNS = ("tensors", "homes", "tables", "keys", "positions", "places", "numels", "contiguous", "storages")


class Crowd:
    """Parameters, or buffers, of torch's own classes: each stands in one place, on a storage of its own, without a
    gradient, and nothing but Python holds it.

    Attributes:
        parameter: they are parameters; plain buffers otherwise.
        tensors: ``T`` tensors.
        homes: the module of each, and its prefix.
        tables: the table of each.
        keys: the key of each in its table.
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
        homes: Sequence[Home] = (),
        tables: Sequence[Table] = (),
        firsts: Sequence[int] = (),
    ) -> None:
        """All that stands in some tables of one kind.

        Args:
            parameter: they are tables of parameters.
            homes: the module of each table, and its prefix.
            tables: ``M`` tables; what is None in them counts too, see `present`.
            firsts: the number of the first tensor of each in the walk.
        """
        self.parameter = parameter
        sizes = list(map(len, tables))
        flat = chain.from_iterable
        self.tensors: list[Tensor] = list(flat(map(methodcaller("values"), tables)))
        self.homes: list[Home] = list(flat(map(repeat, homes, sizes)))
        self.tables: list[Table] = list(flat(map(repeat, tables, sizes)))
        self.keys: list[str] = list(flat(tables))
        self.positions: list[int] = list(flat(map(range, firsts, map(add, firsts, sizes))))
        self.places: list[tuple[torch.device, torch.dtype]] = []
        self.numels: list[int] = []
        self.contiguous: list[bool] = []
        self.storages: list[int] = []
        self.staged: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.tensors)

    def present(self) -> Crowd:
        """Without the places where None stands."""
        # By identity: a tensor answers a comparison with None by a computation.
        ids = list(map(id, self.tensors))
        return self.where(ident != _NONE for ident in ids) if _NONE in ids else self

    def examine(self) -> set[int]:
        """Look at every tensor, once: thousands of them do not fit into the processor's cache.

        Returns:
            The ids of those that something distinguishes, and of their gradients.
        """
        special: set[int] = set()
        parameter, cls = self.parameter, Parameter if self.parameter else Tensor
        strided, quantised = torch.strided, QUANTISED
        use_count, chose_grad_dtype, storage_of = internals.use_count, internals.chose_grad_dtype, internals.storage_of
        for tensor in self.tensors:
            if type(tensor) is not cls or tensor.layout is not strided:
                # Not asked any further: a lazy parameter has no gradient to ask for, a sparse one no storage.
                special.add(id(tensor))
                self.places.append((_NOWHERE, torch.float32))
                self.numels.append(0)
                self.contiguous.append(True)
                self.storages.append(0)
                continue
            grad, dtype = tensor.grad, tensor.dtype
            self.places.append((tensor.device, dtype))
            self.numels.append(tensor.numel())
            self.contiguous.append(tensor.is_contiguous())
            self.storages.append(storage_of(tensor))
            if grad is not None:
                special.add(id(tensor))
                special.add(id(grad))
            elif (
                ((use_count(tensor) != 1 or chose_grad_dtype(tensor)) if parameter else tensor.requires_grad)
                or dtype in quantised
                or tensor.is_inference()
            ):
                special.add(id(tensor))
        return special

    def where(self, chosen: Iterable[object]) -> Crowd:
        """Those of them for which `chosen`, a value for each, is true."""
        mask = list(chosen)
        part = Crowd(self.parameter)
        for column in _COLUMNS:
            setattr(part, column, list(compress(getattr(self, column), mask)))
        return part

    def names(self) -> list[str]:
        """Their full names, as in ``named_parameters()``."""
        return list(map(add, map(itemgetter(1), self.homes), self.keys))

    def entries(self) -> list[Entry]:
        """The same as objects, one for each."""
        made = list(map(Entry, self.tensors, self.homes, self.tables, self.keys))
        for entry, position in zip(made, self.positions, strict=True):
            entry.position = position
            entry.parameter = self.parameter
        return made

    def release(self) -> None:
        """Let go of every tensor and module; a report may go on using the other columns."""
        self.tensors, self.homes, self.tables, self.staged = [], [], [], []
