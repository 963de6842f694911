"""One walk over a module: every tensor once, with all the places it stands in.

The walk is on the path of every conversion, over thousands of modules, so it uses a stack instead of recursion or
generators, and whatever is the same for nearly all tensors is asked of all of them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, compress
from operator import add, attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from . import torch_internals as internals
from .crowd import Crowd
from .entries import Entry, Home, Kind, Slot, Table

__all__ = ["Inventory", "enlist", "survey", "walk"]


class Inventory:
    """Everything that a conversion of one module has to look after."""

    def __init__(self, module: nn.Module, recurse: bool) -> None:
        self.module = module
        self.recurse = recurse
        self.homes: list[Home] = []
        """The modules that hold tensors, in the order of the walk, each with its prefix."""
        self.parameters: list[Table] = []
        """The table of parameters of each of them."""
        self.buffers: list[Table] = []
        """The table of buffers of each of them."""
        self.outside = 0
        """How many come first that are reached without passing a module that brings its own ``_apply``."""
        self.scripts: set[int] = set()
        """The places in `homes` of scripted modules."""
        self.entries: list[Entry] = []
        """What is special, or everything after `expand`, in the order of the walk."""
        self.crowds: list[Crowd] = []
        """All the others: parameters, and buffers."""
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

    def expand(self) -> None:
        """Make an entry for every tensor: for conversions that have to look at them one by one."""
        for crowd in self.crowds:
            entries = crowd.entries()
            self.entries += entries
            self.by_id.update(zip(map(id, crowd.tensors), entries, strict=True))
        if self.crowds:
            # Stable: a gradient stays behind its owner.
            self.entries.sort(key=attrgetter("position"))
        self.crowds = []

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
        for crowd in self.crowds:
            crowd.release()
        self.entries, self.by_id, self.groups, self.crowds = [], {}, [], []
        self.homes, self.parameters, self.buffers = [], [], []


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


def walk(module: nn.Module, recurse: bool = True, *, entered: bool = False) -> Inventory:
    """Find every module and its tables; no tensor is looked at yet.

    Args:
        module: the root.
        recurse: with all its descendants, or the module alone.
        entered: the root's own ``_apply`` is running already, so the root counts as a module without one.
    """
    inventory = Inventory(module, recurse)
    seen: set[int] = set()
    inner: list[Home] = []
    _walk([(module, "")], seen, inventory, inner, entered=entered)
    inventory.outside = len(inventory.homes)
    # What only overriding modules reach comes second, so that a module reached both ways counts as reached directly.
    _walk(inner, seen, inventory, None)
    return inventory


def survey(inventory: Inventory) -> None:
    """Take stock of what a walk has found: parameters, buffers and gradients, each distinct tensor once. Nothing is
    changed."""
    if inventory.overriding or inventory.scripted or inventory.stock or inventory.reducers:
        _take(inventory, None)
        _group(inventory)
    else:
        _part(inventory)


def _walk(
    stack: list[Home],
    seen: set[int],
    inventory: Inventory,
    inner: list[Home] | None,
    *,
    entered: bool = False,
) -> None:
    homes, all_parameters, all_buffers = inventory.homes, inventory.parameters, inventory.buffers
    recurse = inventory.recurse
    tables_and_hooks, own = internals.tables_and_hooks, internals.APPLY
    kinds: dict[type, _ModuleKind | None] = {}
    stack.reverse()
    while stack:
        home = stack.pop()
        module, prefix = home
        ident = id(module)
        if ident in seen:
            continue
        attributes = module.__dict__
        cls = type(module)
        if cls in kinds:
            kind = kinds[cls]
        else:
            kind = kinds[cls] = _ModuleKind.of(cls)
        if kind is not None or own in attributes:
            overrides = own in attributes or (kind is not None and kind.overrides)
            if inner is not None and overrides and not (entered and module is inventory.module):
                inner.append(home)
                inventory.overriding.append(module)
                continue
            if kind is not None:
                inventory.scripted |= kind.script
                if kind.reducer:
                    inventory.reducers.append(prefix[:-1])
                if kind.sharded:
                    inventory.stock = "the model is sharded by FSDP2"
        seen.add(ident)
        try:
            parameters, buffers, children, pre_hooks = tables_and_hooks(attributes)
        except KeyError:
            # Scripted modules answer for what they do not have.
            parameters, buffers, children, pre_hooks = internals.tables_by_attribute(module)
        if pre_hooks:
            inventory.derived.extend((module, name, make) for name, make in internals.derivations_of(module))
        if parameters or buffers:
            # Three lists and no object for each: Python's collector counts objects, and comes by more often.
            homes.append(home)
            all_parameters.append(parameters)
            all_buffers.append(buffers)
            if kind is not None and kind.script:
                inventory.scripts.add(len(homes) - 1)
        if children and recurse:
            stack += [(child, f"{prefix}{name}.") for name, child in reversed(children.items()) if child is not None]


def _take(inventory: Inventory, chosen: set[int] | None) -> None:
    """Make the entries of the tensors whose ids are `chosen`; None stands for all."""
    by_id = inventory.by_id
    position = 0
    for place, home in enumerate(inventory.homes):
        inside, script = place >= inventory.outside, place in inventory.scripts
        for table in (inventory.parameters[place], inventory.buffers[place]):
            is_parameter = table is inventory.parameters[place]
            for key, tensor in table.items():
                position += 1
                if tensor is None or (chosen is not None and id(tensor) not in chosen):
                    continue
                entry = by_id.get(id(tensor))
                if entry is not None:
                    _again(entry, Slot(home, table, key), is_parameter, inside)
                    if is_parameter and entry.grad is None and entry.kind is not Kind.LAZY and tensor.grad is not None:
                        # Met as a buffer first.
                        _add_grad(inventory, entry, tensor.grad)
                    continue
                entry = Entry(tensor, home, table, key)
                entry.position, entry.inside, entry.script = position, inside, script
                _enter(inventory, entry, is_parameter)


def _enter(inventory: Inventory, entry: Entry, is_parameter: bool) -> None:
    """Add an entry, with its gradient."""
    tensor = entry.tensor
    inventory.by_id[id(tensor)] = entry
    inventory.entries.append(entry)
    if type(tensor) not in (Tensor, Parameter):
        entry.kind = _kind_of(tensor)
    if is_parameter:
        if entry.kind is not Kind.LAZY and tensor.grad is not None:
            _add_grad(inventory, entry, tensor.grad)
    elif tensor.requires_grad:
        _learned(inventory, entry)
    else:
        entry.parameter = False


def _part(inventory: Inventory) -> None:
    """Find the special tensors; the others stay together."""
    parameters, buffers = inventory.parameters, inventory.buffers
    sizes = list(map(len, parameters))
    firsts = list(accumulate(map(add, sizes, map(len, buffers)), initial=1))[:-1]
    crowds = [
        Crowd(True, inventory.homes, parameters).fill(firsts),
        Crowd(False, inventory.homes, buffers).fill(map(add, firsts, sizes)),
    ]
    special = set().union(*(crowd.examine() for crowd in crowds))
    if special:
        crowds = [_without(crowd, special) for crowd in crowds]
        _take(inventory, special)
    shared = _sharing(inventory, crowds)
    if shared:
        crowds = [_without(crowd, shared) for crowd in crowds]
        _take(inventory, shared)
    if inventory.entries:
        inventory.entries.sort(key=attrgetter("position"))
        _group(inventory)
    inventory.crowds = [crowd for crowd in crowds if len(crowd)]


def _without(crowd: Crowd, ids: set[int]) -> Crowd:
    return crowd.where(id(tensor) not in ids for tensor in crowd.tensors) if ids else crowd


def _sharing(inventory: Inventory, crowds: list[Crowd]) -> set[int]:
    """Ids of the tensors of the crowds that share a storage with anything, or stand in several places."""
    taken = {
        internals.storage_of(entry.tensor)
        for entry in inventory.entries
        if entry.kind is Kind.PLAIN and entry.tensor.layout is torch.strided
    }
    storages = list(chain.from_iterable(crowd.storages for crowd in crowds))
    shared: set[int] = set()
    if len(set(storages)) < len(storages) or not taken.isdisjoint(storages):
        times = Counter(storages)
        several = {storage for storage, number in times.items() if number > 1} | taken
        for crowd in crowds:
            shared.update(map(id, compress(crowd.tensors, map(several.__contains__, crowd.storages))))
    return shared


class _ModuleKind(NamedTuple):
    overrides: bool
    script: bool
    reducer: bool
    sharded: bool

    @classmethod
    def of(cls, module_class: type[nn.Module]) -> _ModuleKind | None:
        """None for a class that nothing is special about, as nearly all."""
        reducer = internals.data_parallel_class()
        kind = cls(
            internals.class_overrides_apply(module_class),
            issubclass(module_class, torch.jit.ScriptModule),
            reducer is not None and issubclass(module_class, reducer),
            internals.is_fully_sharded(module_class),
        )
        return kind if any(kind) else None


def _kind_of(tensor: Tensor) -> Kind:
    cls = type(tensor)
    if internals.is_lazy_class(cls):
        return Kind.LAZY
    if internals.is_fake(tensor):
        # What makes it fake lies in its attributes, and FakeTensorMode holds weak references to it.
        return Kind.CUSTOM
    if internals.is_wrapper(cls):
        # A device may keep the data of all its tensors in Python: then this is what a plain tensor is there.
        own = internals.has_own_class(tensor.device) and cls is internals.class_on(tensor.device)
        return Kind.PLAIN if own else Kind.WRAPPER
    return Kind.CUSTOM if internals.converts_itself(cls) else Kind.PLAIN


def enlist(inventory: Inventory, tensor: Tensor, slot: Slot) -> Entry:
    """Add a tensor that turned up after the survey, with its gradient."""
    entry = Entry(tensor, *slot)
    _enter(inventory, entry, isinstance(tensor, Parameter))
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
    if entry is not None:
        # Registered too, or the gradient of several: it stays the object that it is.
        entry.parameter = True
    else:
        entry = inventory.by_id[id(grad)] = Entry(grad, owner.home, owner.table, owner.key)
        entry.owner = owner
        entry.inside, entry.position = owner.inside, owner.position
        if type(grad) is not Tensor:
            entry.kind = _kind_of(grad)
        elif not grad.is_leaf:
            # Kept by create_graph: its own graph goes along.
            entry.kind = Kind.CUSTOM
        inventory.entries.append(entry)
    entry.uses += 1
    owner.grad = entry
    inventory.graded = True


def _group(inventory: Inventory) -> None:
    """Find the tensors that share a storage."""
    kind = Kind.PLAIN
    for entry in inventory.entries:
        if entry.kind is kind and entry.tensor.layout is not torch.strided:
            # Sparse layouts have no storage.
            entry.kind = Kind.CUSTOM
    plain = [entry for entry in inventory.entries if entry.kind is kind]
    storages = [internals.storage_of(entry.tensor) for entry in plain]
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
