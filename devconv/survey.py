"""One walk over a module: every tensor once, with all the places it stands in.

The walk is on the path of every conversion, over thousands of modules, so it uses a stack instead of recursion or
generators and makes one object for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from . import torch_internals as internals
from .policy import Route

__all__ = ["QUANTISED", "Cohorts", "Decision", "Entry", "Home", "Inventory", "Kind", "Slot", "enlist", "survey"]


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
    script: bool = False
    grad: Entry | None = None
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


class Inventory:
    """Everything that a conversion of one module has to look after."""

    def __init__(self, module: nn.Module, recurse: bool) -> None:
        self.module = module
        self.recurse = recurse
        self.entries: list[Entry] = []
        self.by_id: dict[int, Entry] = {}
        self.groups: list[list[Entry]] = []
        self.overriding: list[nn.Module] = []
        """The outermost modules with their own ``_apply``, in the order of the walk."""
        self.derived: list[tuple[nn.Module, str, Callable[[], Tensor]]] = []
        """Attributes that a forward pre-hook derives from parameters, each with what derives it afresh."""
        self.graded = False
        """Some tensor has a gradient."""
        self.scripted = False
        """The tree holds a scripted module."""
        self.stock = ""
        """Why stock torch does the whole conversion right by itself; empty when it does not."""
        self.reducers: list[str] = []
        """Names of the modules that are DistributedDataParallel."""
        self.modules = 0

    def ties(self) -> Iterator[Entry]:
        """Entries that stand in more than one place."""
        return (entry for entry in self.entries if entry.more)

    def batches(self, limit: int) -> Iterator[list[Entry]]:
        """The entries in batches of at most `limit` bytes (or one entry), those of a group or a gradient together."""
        batch: list[Entry] = []
        held = 0
        taken: set[int] = set()
        for entry in self.entries:
            if id(entry) in taken or entry.inside:
                continue
            family = _family(entry)
            taken.update(map(id, family))
            size = sum(member.new_bytes() for member in family)
            if batch and held + size > limit:
                yield batch
                batch, held = [], 0
            batch += family
            held += size
        inside = [entry for entry in self.entries if entry.inside]
        yield from (part for part in (batch, inside) if part)

    def release(self) -> None:
        """Let go of every tensor: entries refer to each other, and would wait for the cyclic collector."""
        for entry in self.entries:
            if entry.group is not None or entry.grad is not None or entry.owner is not None:
                entry.let_go()
        self.entries, self.by_id, self.groups = [], {}, []


def _family(entry: Entry) -> list[Entry]:
    """An entry with the entries that have to be converted together with it."""
    family: dict[int, Entry] = {}
    waiting = [entry]
    while waiting:
        member = waiting.pop()
        if id(member) not in family:
            family[id(member)] = member
            waiting += [other for other in (member.grad, member.owner, *(member.group or ())) if other is not None]
    return list(family.values())


def survey(module: nn.Module, recurse: bool = True, *, entered: bool = False) -> Inventory:
    """Take stock of `module`; nothing is changed.

    Args:
        module: the root.
        recurse: with all its descendants, or the module alone.
        entered: the root's own ``_apply`` is running already, so the root counts as a module without one.

    Returns:
        Its parameters, buffers and gradients, each distinct tensor once.
    """
    inventory = Inventory(module, recurse)
    seen: set[int] = set()
    inner: list[Home] = []
    _walk([(module, "")], seen, inventory, inner, entered=entered)
    # What only overriding modules reach comes second, so that a module reached both ways counts as reached directly.
    _walk(inner, seen, inventory, None)
    _group(inventory)
    return inventory


def _walk(
    stack: list[Home],
    seen: set[int],
    inventory: Inventory,
    inner: list[Home] | None,
    *,
    entered: bool = False,
) -> None:
    inside = inner is None
    kinds: dict[type, _ModuleKind] = {}
    tables_and_hooks, own = internals.tables_and_hooks, internals.APPLY
    entries, by_id, lazy, recurse = inventory.entries, inventory.by_id, Kind.LAZY, inventory.recurse
    stack.reverse()
    while stack:
        home = stack.pop()
        module, prefix = home
        if id(module) in seen:
            continue
        cls = type(module)
        kind = kinds.get(cls)
        if kind is None:
            kind = kinds[cls] = _ModuleKind.of(cls)
            if kind.sharded:
                inventory.stock = "the model is sharded by FSDP2"
        overrides = kind.overrides or own in module.__dict__
        if inner is not None and overrides and not (entered and module is inventory.module):
            inner.append(home)
            inventory.overriding.append(module)
            continue
        seen.add(id(module))
        if kind.reducer:
            inventory.reducers.append(prefix[:-1])
        table, buffers, children, pre_hooks = tables_and_hooks(module)
        if pre_hooks:
            inventory.derived.extend((module, name, make) for name, make in internals.derivations_of(module))
        first = len(entries)
        for key, tensor in table.items():
            if tensor is None:
                continue
            ident = id(tensor)
            if ident in by_id:
                _again(by_id[ident], Slot(home, table, key), True, inside)
                continue
            entry = by_id[ident] = Entry(tensor, home, table, key)
            entries.append(entry)
            if type(tensor) is not Parameter:
                entry.kind = _kind_of(tensor)
                if entry.kind is lazy:
                    continue
            grad = tensor.grad
            if grad is not None:
                _add_grad(inventory, entry, grad)
        table = buffers
        for key, tensor in buffers.items():
            if tensor is None:
                continue
            ident = id(tensor)
            if ident in by_id:
                _again(by_id[ident], Slot(home, table, key), False, inside)
                continue
            entry = by_id[ident] = Entry(tensor, home, table, key)
            entries.append(entry)
            if type(tensor) is not Tensor:
                entry.kind = _kind_of(tensor)
            if tensor.requires_grad:
                _learned(inventory, entry)
            else:
                entry.parameter = False
        if inside:
            for entry in entries[first:]:
                entry.inside = True
        if kind.script:
            inventory.scripted = True
            for entry in entries[first:]:
                entry.script = True
        if recurse and children:
            below = [(child, f"{prefix}{name}.") for name, child in children.items() if child is not None]
            below.reverse()
            stack += below
    inventory.modules = len(seen)


class _ModuleKind(NamedTuple):
    overrides: bool
    script: bool
    reducer: bool
    sharded: bool

    @classmethod
    def of(cls, module_class: type[nn.Module]) -> _ModuleKind:
        reducer = internals.data_parallel_class()
        return cls(
            internals.class_overrides_apply(module_class),
            issubclass(module_class, torch.jit.ScriptModule),
            reducer is not None and issubclass(module_class, reducer),
            internals.is_fully_sharded(module_class),
        )


def _kind_of(tensor: Tensor) -> Kind:
    cls = type(tensor)
    if internals.is_lazy_class(cls):
        return Kind.LAZY
    if internals.is_fake(tensor):
        # What makes it fake lies in its attributes, and FakeTensorMode holds weak references to it.
        return Kind.CUSTOM
    if internals.is_wrapper(cls):
        return Kind.WRAPPER
    return Kind.CUSTOM if internals.converts_itself(cls) else Kind.PLAIN


def enlist(inventory: Inventory, tensor: Tensor, slot: Slot) -> Entry:
    """Add a tensor that turned up after the survey, with its gradient."""
    entry = inventory.by_id[id(tensor)] = Entry(tensor, *slot)
    inventory.entries.append(entry)
    if type(tensor) not in (Tensor, Parameter):
        entry.kind = _kind_of(tensor)
    if isinstance(tensor, Parameter):
        if entry.kind is not Kind.LAZY and tensor.grad is not None:
            _add_grad(inventory, entry, tensor.grad)
    elif tensor.requires_grad:
        _learned(inventory, entry)
    else:
        entry.parameter = False
    return entry


def _again(entry: Entry, slot: Slot, parameter: bool, inside: bool) -> None:
    """A tensor that was met before: a tie."""
    entry.more = [*(entry.more or ()), slot]
    entry.parameter |= parameter
    entry.inside &= inside


def _learned(inventory: Inventory, entry: Entry) -> None:
    """A buffer that requires a gradient: as a parameter, unless it is the result of a computation."""
    tensor = entry.tensor
    if not tensor.is_leaf:
        entry.parameter = False
        entry.kind = Kind.CUSTOM if entry.kind is Kind.PLAIN else entry.kind
    elif entry.kind is not Kind.LAZY and tensor.grad is not None:
        _add_grad(inventory, entry, tensor.grad)


def _add_grad(inventory: Inventory, owner: Entry, grad: Tensor) -> None:
    entry = inventory.by_id.get(id(grad))
    if entry is None:
        entry = inventory.by_id[id(grad)] = Entry(grad, owner.home, owner.table, owner.key)
        entry.owner = owner
        entry.inside = owner.inside
        if type(grad) is not Tensor:
            entry.kind = _kind_of(grad)
        elif not grad.is_leaf:
            # Kept by create_graph: its own graph goes along.
            entry.kind = Kind.CUSTOM
        inventory.entries.append(entry)
    owner.grad = entry
    inventory.graded = True


def _group(inventory: Inventory) -> None:
    """Find the tensors that share a storage."""
    kind = Kind.PLAIN
    plain = [entry for entry in inventory.entries if entry.kind is kind]
    try:
        storages = internals.storages_of([entry.tensor for entry in plain])
    except (NotImplementedError, RuntimeError):
        # Sparse layouts have no storage; the rest of the model may.
        for entry in plain:
            if entry.tensor.layout is not torch.strided:
                entry.kind = Kind.CUSTOM
        plain = [entry for entry in plain if entry.kind is kind]
        storages = internals.storages_of([entry.tensor for entry in plain])
    if len(set(storages)) == len(storages):
        return
    first: dict[int, Entry] = {}
    for entry, storage in zip(plain, storages, strict=True):
        other = first.setdefault(storage, entry)
        if other is not entry:
            if other.group is None:
                other.group = [other]
                inventory.groups.append(other.group)
            other.group.append(entry)
            entry.group = other.group
