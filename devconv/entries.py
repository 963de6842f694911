"""What a conversion knows of one tensor: where it stands, what kind it is, and what was decided about it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .policy import Route

__all__ = ["QUANTISED", "Cohorts", "Decision", "Entry", "Home", "Kind", "Slot", "Table"]


class Kind(IntEnum):
    """How a tensor's class behaves in a conversion."""

    PLAIN = 0
    """As torch's own: attributes, slots and class can be carried."""
    LAZY = 1
    """Uninitialised: it has a target, and no shape."""
    WRAPPER = 2
    """Keeps its data in inner tensors."""
    CUSTOM = 3
    """Is asked for its conversion, one tensor at a time: its class has its own idea of one, or the tensor is sparse,
    quantised, or the result of a computation."""


QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""Dtypes whose tensors carry scales and zero points beside their storage."""

Table = dict[str, "Tensor | None"]


Home = tuple[nn.Module, str]
"""A module, and the prefix that its tensors' full names begin with."""


class Slot(NamedTuple):
    """One place where a tensor stands: an entry of a module's table of parameters or buffers."""

    home: Home
    table: Table
    key: str

    @property
    def name(self) -> str:
        return self.home[1] + self.key


class Decision(NamedTuple):
    """What is to happen to a tensor.

    Attributes:
        route: the way it is converted.
        device: where it is.
        dtype: what it is.
        target: where it goes.
        to_dtype: what it becomes.
    """

    route: Route
    device: torch.device
    dtype: torch.dtype
    target: torch.device
    to_dtype: torch.dtype


class Entry:
    """One distinct tensor of the model, and what the conversion makes of it."""

    # Defaults on the class: thousands of entries are made for a large model, and nearly all keep nearly all of these.
    kind: Kind = Kind.PLAIN
    parameter: bool = True
    """Keeps its identity: a parameter, a gradient, or a buffer that requires a gradient."""
    inside: bool = False
    """Reached only through modules that bring their own ``_apply``."""
    position: int = 0
    """Its number in the walk; a gradient has its owner's."""
    script: bool = False
    grad: Entry | None = None
    uses: int = 1
    """C++ references to it that are explained: Python's object, and the parameters whose gradient it is."""
    owner: Entry | None = None
    """For a gradient: the entry whose gradient it is."""
    more: list[Slot] | None = None
    """The other places where it stands."""
    group: list[Entry] | None = None
    """Entries on the same storage, this one among them; None when it is alone."""
    live: bool = False
    """A graph recorded before the conversion holds it."""
    spent: bool = False
    """The live graph needs nothing but the place to put the gradient."""
    decision: Decision
    """Set by the planner; shared by all entries that are decided alike."""
    staged: Tensor = None  # type: ignore[assignment]
    """The new tensor; None before staging, and for what stays. After a swap it holds the old TensorImpl."""
    committed: bool = False

    def __init__(self, tensor: Tensor, home: Home, table: Table, key: str) -> None:
        self.tensor = tensor
        self.home = home
        self.table = table
        self.key = key

    def let_go(self) -> None:
        """Drop the new and the old tensor."""
        self.grad = self.owner = self.group = None
        self.staged = None  # type: ignore[assignment]
        del self.tensor

    def new_bytes(self) -> int:
        """Size of the tensor that will take its place."""
        return 0 if self.kind is Kind.LAZY else self.tensor.numel() * self.decision.to_dtype.itemsize

    @property
    def slots(self) -> list[Slot]:
        """Every place where it stands; none for a gradient."""
        if self.owner is not None:
            return []
        return [Slot(self.home, self.table, self.key), *(self.more or ())]

    @property
    def name(self) -> str:
        """Full name, as in ``named_parameters()``; gradients end in ``.grad``."""
        return self.home[1] + self.key + (".grad" if self.owner is not None else "")

    @property
    def names(self) -> tuple[str, ...]:
        """The full name of every place it stands in."""
        if self.owner is not None:
            return tuple(f"{name}.grad" for name in self.owner.names)
        return tuple(slot.name for slot in self.slots)


Cohorts = dict[Decision, list[Entry]]
"""Entries by what was decided."""
