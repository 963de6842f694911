"""Inventory and target in, plan out: the route of every tensor, and everything that has to be refused.

Nothing is changed here. All that can be refused is refused at this step, with all reasons at once, and only what
stock torch would break.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import eq, itemgetter

import torch
from torch import Tensor, nn

from . import registry
from . import torch_internals as internals
from .crowd import Crowd
from .entries import QUANTISED, Cohorts, Decision, Entry, Kind
from .errors import Refusal
from .policy import Route, choose
from .report import Item, Summary, as_dict, render, size
from .survey import Inventory
from .transfer import Transfer

__all__ = ["Flags", "Plan", "cohorts_of", "decide_result", "items_of", "make_plan", "settled"]


@dataclass(frozen=True)
class Flags:
    """torch's own future flags, read once for each conversion."""

    swap: bool
    overwrite: bool

    @classmethod
    def current(cls) -> Flags:
        return cls(
            torch.__future__.get_swap_module_params_on_conversion(),
            torch.__future__.get_overwrite_module_params_on_conversion(),
        )


class Plan(Summary):
    """What a conversion would do. Printing it shows the table; nothing has been changed.

    Attributes:
        what: the conversion, as ``"xla:0"`` or ``"torch.float64"``.
        refusals: every reason why it would be refused; empty when it would be carried out.
        peak_bytes: bytes of model memory that exist at the moment of most, sources included, where source and target
            share one memory; otherwise the bytes on the target.
        holders: number of tensors that a live graph, or something else in C++, refers to.
        notes: what the caller should know, one sentence each.
    """

    def __init__(self, inventory: Inventory, what: str) -> None:
        super().__init__(tuple)
        self.inventory = inventory
        self.what = what
        self.refusals: list[Refusal] = []
        self.notes: list[str] = []
        self.peak_bytes = 0
        self.holders = 0
        self.cohorts: Cohorts = {}
        """The entries that change, by what was decided."""
        self.crowds: list[Crowd] = []
        """What the crowds of the inventory were parted into: tensors that change alike."""
        self.stock = False
        """The whole conversion is passed through to stock torch."""

    @property
    def changes(self) -> bool:
        """Whether any tensor is converted."""
        return bool(self.cohorts or self.crowds)

    def settle(self) -> None:
        """Make the items, for a plan that is handed out."""
        self._rows = items_of(self.inventory)

    def release(self) -> None:
        """Let go of the module; the items stay."""
        self.inventory = Inventory(nn.Module(), recurse=False)
        self.cohorts = {}
        self.crowds = []

    def to_json(self) -> str:
        """The plan as a JSON object, with every item."""
        return json.dumps(
            {
                "what": self.what,
                "bytes": self.bytes,
                "peak_bytes": self.peak_bytes,
                "routes": {str(route): number for route, number in self.routes.items()},
                "ties": self.ties,
                "refusals": [str(refusal) for refusal in self.refusals],
                "notes": self.notes,
                "items": [as_dict(item) for item in self.items],
            }
        )

    def __str__(self) -> str:
        facts = [f"peak {size(self.peak_bytes)}"]
        return render(f"plan for {self.what}", self, facts, self.notes, self.refusals)


def items_of(inventory: Inventory) -> Callable[[], Iterable[Item]]:
    """What a decided inventory holds as items, made when asked for, without keeping a tensor or a module."""
    special = [
        (entry.position, entry.names, _kind_name(entry), entry.decision, _numel(entry)) for entry in inventory.entries
    ]
    prefixes = [prefix for _, prefix in inventory.homes]
    crowds = [
        (
            crowd.positions,
            crowd.owners,
            crowd.keys,
            "parameter" if crowd.parameter else "buffer",
            crowd.decision,
            crowd.numels,
        )
        for crowd in inventory.crowds
    ]

    def make() -> Iterable[Item]:
        rows = list(special)
        for positions, owners, keys, kind, decision, numels in crowds:
            for position, owner, key, numel in zip(positions, owners, keys, numels, strict=True):
                rows.append((position, (prefixes[owner] + key,), kind, decision, numel))
        # Stable: a gradient stays behind its owner.
        rows.sort(key=itemgetter(0))
        for _, names, kind, decision, numel in rows:
            yield Item(
                names,
                kind,
                decision.route,
                _place(decision.device, decision.dtype),
                _place(decision.target, decision.to_dtype),
                numel * decision.to_dtype.itemsize,
            )

    return make


def _numel(entry: Entry) -> int:
    return 0 if entry.kind is Kind.LAZY else entry.tensor.numel()


def _kind_name(entry: Entry) -> str:
    if entry.kind is Kind.LAZY:
        return "lazy"
    if entry.owner is not None:
        return "grad"
    return "parameter" if entry.parameter else "buffer"


def _place(device: torch.device, dtype: torch.dtype) -> str:
    return f"{device} {str(dtype).removeprefix('torch.')}"


def _knows_better(cls: type) -> bool:
    """Whether only the class itself can tell if there is nothing to do."""
    return not internals.is_lazy_class(cls) and (internals.is_wrapper(cls) or internals.converts_itself(cls))


def settled(inventory: Inventory, transfer: Transfer) -> bool:
    """Whether a transfer has nothing to do anywhere in what a walk has found.

    A tree that holds a module with its own ``_apply`` is never settled: only that module knows.
    """
    if inventory.overriding or transfer.empty or transfer.memory_format is not None:
        return False
    # Tensor by tensor: thousands do not fit into the processor's cache, and are looked at once this way. Two loops,
    # since asking each tensor which kind of table it is from would cost a tenth of a no-op.
    device, dtype_for, parameter_class = transfer.device, transfer.dtype_for, nn.Parameter
    casts = transfer.dtype is not None
    for table in inventory.parameters:
        for tensor in table.values():
            if tensor is None:
                continue
            if (device is not None and tensor.device != device) or (
                casts and dtype_for(tensor.dtype) is not tensor.dtype
            ):
                return False
            kind = type(tensor)
            if kind is not parameter_class:
                if internals.is_lazy_class(kind):
                    continue
                if _knows_better(kind) or not tensor.is_leaf:
                    return False
            grad = tensor.grad
            if grad is not None and (
                (device is not None and grad.device != device) or dtype_for(grad.dtype) is not grad.dtype
            ):
                return False
    for table in inventory.buffers:
        for tensor in table.values():
            if tensor is None:
                continue
            if (device is not None and tensor.device != device) or (
                casts and dtype_for(tensor.dtype) is not tensor.dtype
            ):
                return False
            if tensor.requires_grad or (type(tensor) is not Tensor and _knows_better(type(tensor))):
                return False
    return True


@dataclass
class _Planner:
    """The state of one planning: what has been decided already, for tensors that are alike."""

    plan: Plan
    flags: Flags
    examined: list[Entry] = field(default_factory=list)

    def refuse(self, entry: Entry, why: str, cure: str) -> None:
        self.plan.refusals.append(Refusal(entry.name, str(entry.decision.device), why, cure))

    def decide_all(self, inventory: Inventory, transfer: Transfer) -> None:
        """Decide the tensors of a pure transfer: alike ones once, as long as nothing but Python holds them."""
        memo: dict[tuple[torch.device, torch.dtype, bool, bool, bool], Decision] = {}
        plain, keep, use_count = Kind.PLAIN, Route.KEEP, internals.use_count
        for entry in inventory.entries:
            tensor = entry.tensor
            if entry.kind is plain:
                key = (tensor.device, tensor.dtype, entry.parameter, entry.owner is None, tensor.is_inference())
                known = memo.get(key)
                if known is not None and (
                    known.route is keep or not entry.parameter or use_count(tensor) == entry.uses
                ):
                    entry.decision = known
                    continue
            self.decide(entry, transfer.device, transfer.dtype_for(tensor.dtype))
            if entry.kind is plain and not entry.live:
                memo[key] = entry.decision
        inventory.crowds = [
            part
            for crowd in inventory.crowds
            for alike in _parted(crowd, crowd.places)
            for part in self.decide_crowd(alike, transfer)
        ]

    def decide_crowd(self, crowd: Crowd, transfer: Transfer) -> list[Crowd]:
        """What is decided of one is decided of all, in as many parts as it takes."""
        first = crowd.where([True]).entries()[0]
        self.decide(first, transfer.device, transfer.dtype_for(first.tensor.dtype))
        crowd.decision = first.decision
        if first.decision.route is not Route.SET_DATA and not first.tensor.is_inference():
            return [crowd]
        # Not looked at before: only to an assignment to .data does it make a difference.
        parts = _parted(crowd, list(map(Tensor.is_inference, crowd.tensors)))
        return parts if len(parts) == 1 else [same for part in parts for same in self.decide_crowd(part, transfer)]

    def decide(
        self, entry: Entry, target: torch.device | None, to_dtype: torch.dtype, same_object: bool = False
    ) -> None:
        """Set the decision of one entry whose target is known."""
        tensor = entry.tensor
        device, dtype = tensor.device, tensor.dtype
        target = device if target is None else target
        if entry.kind is Kind.PLAIN and dtype in QUANTISED:
            entry.kind = Kind.CUSTOM
        done = same_object or (device == target and dtype is to_dtype)
        if not done and entry.parameter and entry.kind is not Kind.LAZY:
            self.examine(entry)
        wrapper = entry.kind is Kind.WRAPPER
        served = registry.backend_for(target.type)
        route = choose(
            settled=done,
            lazy=entry.kind is Kind.LAZY,
            buffer=not entry.parameter,
            wrapper=wrapper,
            held=wrapper and (entry.live or internals.has_weak_references(tensor)),
            swap_flag=self.flags.swap,
            overwrite_flag=self.flags.overwrite and entry.owner is None,
            live_graph=entry.live,
            in_place=served.in_place,
            # What the device lacks is refused below, by name; a scratch tensor of it would be torch's own error. One that
            # was made under inference mode would take an ordinary tensor's data and still count no versions.
            set_data_works=not done
            and entry.kind is Kind.PLAIN
            and served.capabilities.holds(to_dtype)
            and not tensor.is_inference()
            and set_data_works(device, dtype, target, to_dtype),
        )
        entry.decision = Decision(route, device, dtype, target, to_dtype)

    def examine(self, entry: Entry) -> None:
        """Find out what besides Python holds a parameter."""
        tensor = entry.tensor
        extra = internals.use_count(tensor) - entry.uses
        if extra <= 0 or entry.script:
            # TorchScript holds its own tensors, and those are updated in place or refused.
            return
        if tensor.is_leaf and tensor.requires_grad and internals.has_accumulator(tensor):
            entry.spent = extra == 1
            entry.live = True
            extra -= 1
        elif not tensor.requires_grad:
            # A graph may have saved it; nobody can tell, and the graph stays right with the old one.
            entry.live = True
        self.plan.holders += 1
        if extra:
            self.examined.append(entry)


def _parted(crowd: Crowd, marks: Sequence[object]) -> list[Crowd]:
    """A crowd by a mark for each of its tensors."""
    kinds = dict.fromkeys(marks)
    return [crowd] if len(kinds) == 1 else [crowd.where(map(eq, marks, repeat(kind))) for kind in kinds]


_works: dict[tuple[torch.device, torch.dtype, torch.device, torch.dtype], bool] = {}


def set_data_works(
    device: torch.device,
    dtype: torch.dtype,
    target: torch.device,
    to_dtype: torch.dtype,
) -> bool:
    """Whether ``p.data = new`` carries a strided parameter over, tried once on a scratch parameter.

    torch's own predicate is not asked: it can say yes where the assignment fails, and the other way round.

    Args:
        device: where the parameter is.
        dtype: what it is.
        target: where the new tensor is.
        to_dtype: what it is.

    >>> set_data_works(torch.device("cpu"), torch.float32, torch.device("cpu"), torch.float64)
    True
    >>> set_data_works(torch.device("cpu"), torch.float32, torch.device("meta"), torch.float32)
    False
    """
    key = (device, dtype, target, to_dtype)
    known = _works.get(key)
    if known is None:
        with torch.inference_mode(mode=False), torch.no_grad():
            scratch = nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad=False)
            new = torch.empty(0, device=target, dtype=to_dtype)
            try:
                scratch.data = new
            except RuntimeError:
                known = False
            else:
                known = scratch.device == new.device and scratch.dtype is to_dtype
        _works[key] = known
    return known


def make_plan(
    inventory: Inventory, transfer: Transfer, results: dict[int, Tensor] | None = None, *, opaque: bool = False
) -> Plan:
    """Decide the route of every tensor, and refuse what has to be refused.

    Args:
        inventory: what the module holds.
        transfer: the conversion, its device resolved; says nothing about tensors that have a result.
        results: what the function returned for the tensors that were asked already, by the tensor's id.
        opaque: the function is no pure transfer, so that every tensor was asked.
    """
    results = results or {}
    what = "what the function returned" if opaque else str(transfer)
    plan = Plan(inventory, what)
    planner = _Planner(plan, Flags.current())
    if inventory.stock:
        plan.stock = True
        plan.notes.append(f"passed through to stock torch: {inventory.stock}")
    if not opaque:
        planner.decide_all(inventory, transfer)
    for entry in inventory.entries if results else ():
        result = results.get(id(entry.tensor))
        if result is not None:
            planner.decide(entry, result.device, result.dtype, same_object=result is entry.tensor)
            if result is not entry.tensor and entry.decision.route is Route.KEEP:
                _reopen(planner, entry, None)
    if transfer.memory_format is not None or transfer.empty:
        for entry in inventory.entries:
            if entry.decision.route is Route.KEEP and id(entry.tensor) not in results:
                _reopen(planner, entry, transfer)
    plan.cohorts = cohorts_of(inventory.entries)
    plan.crowds = [crowd for crowd in inventory.crowds if crowd.decision.route is not Route.KEEP]
    for decision in [decision for decision in plan.cohorts if decision.route is Route.KEEP]:
        del plan.cohorts[decision]
    _refuse(planner, transfer, opaque)
    _measure(plan)
    return plan


def decide_result(plan: Plan, entry: Entry, result: Tensor) -> None:
    """Decide one tensor afresh from the result that a module's own ``_apply`` made of it."""
    planner = _Planner(plan, Flags.current())
    planner.decide(entry, result.device, result.dtype, same_object=result is entry.tensor)
    if result is not entry.tensor and entry.decision.route is Route.KEEP:
        _reopen(planner, entry, None)


def _reopen(planner: _Planner, entry: Entry, transfer: Transfer | None) -> None:
    """Give a tensor that stays on its device and dtype a route: new contents or other strides are wanted."""
    if entry.kind is Kind.LAZY:
        return
    if transfer is not None and transfer.memory_format is not None:
        dims = entry.tensor.dim()
        if dims not in (4, 5) or entry.tensor.is_contiguous(memory_format=transfer.memory_format):
            return
    planner.examine(entry)
    decision = entry.decision
    if not entry.parameter:
        route = Route.OVERWRITE
    elif entry.kind is Kind.WRAPPER:
        route = Route.REFUSE if entry.live else Route.FULL_SWAP
    elif planner.flags.swap or entry.live:
        route = Route.SWAP
    elif planner.flags.overwrite and entry.owner is None:
        route = Route.OVERWRITE
    else:
        route = Route.SET_DATA if entry.kind is Kind.PLAIN else Route.SWAP
    entry.decision = decision._replace(route=route)


def cohorts_of(entries: Iterable[Entry]) -> Cohorts:
    """The entries by what was decided: thousands of entries, a handful of decisions."""
    cohorts: Cohorts = {}
    for entry in entries:
        cohorts.setdefault(entry.decision, []).append(entry)
    return cohorts


def _refuse(planner: _Planner, transfer: Transfer, opaque: bool) -> None:
    plan = planner.plan
    if plan.stock:
        return
    for decision, cohort in plan.cohorts.items():
        for why, cure in _unfit(decision, transfer, opaque):
            for entry in cohort:
                if entry.kind is not Kind.LAZY:
                    planner.refuse(entry, why, cure)
        for why, cure in _lacking(decision):
            for entry in cohort:
                planner.refuse(entry, why, cure)
        if internals.has_own_class(decision.target):
            for entry in cohort:
                _refuse_embodied(planner, entry)
        if decision.route is Route.REFUSE:
            for entry in cohort:
                planner.refuse(
                    entry,
                    f"a {type(entry.tensor).__name__} is swapped whole, and a live graph or a weak reference holds it",
                    "Run backward() or drop the graph first, and drop weak references to it.",
                )
    for crowd in plan.crowds:
        for why, cure in (*_unfit(crowd.decision, transfer, opaque), *_lacking(crowd.decision)):
            for name in crowd.names():
                plan.refusals.append(Refusal(name, str(crowd.decision.device), why, cure))
    if plan.inventory.scripted:
        _refuse_scripted(planner)
    _refuse_reducers(planner)
    _refuse_groups(planner)
    _refuse_views(planner)


def _unfit(decision: Decision, transfer: Transfer, opaque: bool) -> Iterator[tuple[str, str]]:
    """Why, and with what cure, what was decided cannot be done to any tensor that has values."""
    if decision.device.type == "meta" and decision.target.type != "meta" and not transfer.empty and not opaque:
        yield "a meta tensor has no values to move", "Use module.to_empty(device=...)."
    if decision.dtype.is_complex and not decision.to_dtype.is_complex:
        yield (
            f"{decision.dtype} to {decision.to_dtype} drops the imaginary part",
            "Convert it yourself, with .real or torch.view_as_real.",
        )


def _lacking(decision: Decision) -> Iterator[tuple[str, str]]:
    """As `_unfit`, of lazy tensors too."""
    if not registry.backend_for(decision.target.type).capabilities.holds(decision.to_dtype):
        yield (
            f"{decision.target.type} cannot hold {decision.to_dtype}",
            f"Convert it on {decision.device.type} first, for example with .float().",
        )


def _refuse_embodied(planner: _Planner, entry: Entry) -> None:
    """What cannot become an object of the class that a device has for its tensors."""
    where = f"on {entry.decision.target} a tensor's data lies in a Python object of the vendor's class"
    if entry.kind is Kind.LAZY:
        planner.refuse(
            entry,
            f"{where}, and torch's lazy tensors cannot become one",
            "Call devconv.materialize(model, *example_inputs) before moving it.",
        )
    elif entry.parameter and entry.decision.route is Route.OVERWRITE:
        planner.refuse(
            entry,
            f"{where}, which torch's overwrite flag cannot make",
            "Leave torch.__future__'s overwrite flag False.",
        )
    elif type(entry.tensor) not in (Tensor, nn.Parameter, internals.class_on(entry.decision.target)):
        planner.refuse(
            entry,
            f"{where}, so that it would lose its own class, {type(entry.tensor).__name__}",
            "Make it a plain Parameter first, or leave it where it is.",
        )


def _refuse_scripted(planner: _Planner) -> None:
    for decision, cohort in planner.plan.cohorts.items():
        for entry in cohort if decision.route is not Route.SET_DATA else ():
            if entry.script and entry.parameter:
                planner.refuse(
                    entry,
                    "a scripted module keeps its own reference to a parameter, so it can only be updated in place",
                    "Move the module before scripting it, or load it with torch.jit.load(map_location=...).",
                )


_REDUCER_CURE = (
    "Wrap the model after moving it; to save it from the CPU, use torch.save(ddp.module.state_dict()) or move a copy: "
    "copy.deepcopy(ddp.module).cpu()."
)


def _refuse_reducers(planner: _Planner) -> None:
    plan = planner.plan
    if plan.inventory.reducers and plan.changes:
        for name in plan.inventory.reducers:
            plan.refusals.append(
                Refusal(
                    name,
                    "DistributedDataParallel",
                    "its reducer keeps the old parameters and would silently stop synchronising",
                    _REDUCER_CURE,
                )
            )


def _refuse_groups(planner: _Planner) -> None:
    """Tensors that share a storage, on the way to a device where none can."""
    for group in planner.plan.inventory.groups:
        for entry in group:
            target = entry.decision.target
            changes = entry.decision.route is not Route.KEEP
            if changes and not registry.backend_for(target.type).capabilities.storage_aliasing:
                others = ", ".join(other.name for other in group if other is not entry)
                planner.refuse(
                    entry,
                    f"it shares a storage with {others}, and on {target.type} no two tensors can",
                    "Make it a tensor of its own with .clone().",
                )


def _refuse_views(planner: _Planner) -> None:
    """Views and reducers outside the tree, for the tensors that something unexplained holds."""
    if not planner.examined:
        return
    own = {id(entry.tensor) for entry in planner.plan.inventory.entries}
    suspects = {id(entry.tensor): entry for entry in planner.examined}
    held, reduced = internals.outside_holders({key: entry.tensor for key, entry in suspects.items()}, own)
    for key in reduced:
        entry = suspects[key]
        if not planner.plan.inventory.reducers:
            planner.refuse(entry, "a DistributedDataParallel outside the converted module reduces it", _REDUCER_CURE)
    for key, shape in held.items():
        entry = suspects[key]
        planner.refuse(
            entry,
            f"something outside the converted module holds a view of it, of shape {tuple(shape)}, that would go stale",
            "Drop the view first, or register it as a buffer of the module.",
        )
    inside = internals.views_of(
        [entry.tensor for entry in planner.plan.inventory.entries if entry.kind is not Kind.LAZY]
    )
    for key, entry in suspects.items():
        tensor = entry.tensor
        if key in held or key in reduced or key in inside or entry.live or not tensor.requires_grad:
            continue
        planner.refuse(
            entry,
            "something in C++ refers to it that is no autograd graph (such as a view made under no_grad)",
            "Find and drop it: tensor views, gradient edges, or another library's handle on the parameter.",
        )


def _measure(plan: Plan) -> None:
    moved: dict[torch.device, int] = {}
    sources = 0
    for decision, numel, strided in _sizes(plan):
        if decision.route is Route.RETARGET or decision.target.type == "meta":
            continue
        moved[decision.target] = moved.get(decision.target, 0) + numel * decision.to_dtype.itemsize
        if decision.device == decision.target or _shares_memory(decision.device, decision.target):
            sources += numel * decision.dtype.itemsize
        if strided and not registry.backend_for(decision.target.type).capabilities.strides:
            plan.notes.append(f"{strided} tensors arrive contiguous: {decision.target.type} keeps no strides")
    plan.peak_bytes = sources + sum(moved.values())
    for target, needed in moved.items():
        served = registry.backend_for(target.type)
        if not served.capabilities.autograd:
            plan.notes.append(
                f"torch's autograd does not run on {target.type}: the model can be used there, not trained"
            )
        free = served.free_memory(target)
        if free is None and served.capabilities.host_memory:
            free = registry.backend_for("cpu").free_memory(torch.device("cpu"))
        if free is not None and needed > free:
            plan.refusals.append(
                Refusal(
                    "",
                    str(target),
                    f"{size(needed)} are needed and {size(free)} are free",
                    "Free memory on the device, or convert to a smaller dtype first.",
                )
            )


def _sizes(plan: Plan) -> Iterator[tuple[Decision, int, int]]:
    """For each decision: the number of elements, and the number of tensors that are not contiguous."""
    for crowd in plan.crowds:
        yield crowd.decision, sum(crowd.numels), len(crowd) - sum(crowd.contiguous)
    for decision, cohort in plan.cohorts.items():
        numel = sum(_numel(entry) for entry in cohort if entry.group is None)
        groups = {id(entry.group): entry.group for entry in cohort if entry.group is not None}
        # Once for the storage, as far as the largest member tells.
        numel += sum(max(member.tensor.numel() for member in group) for group in groups.values())
        yield decision, numel, sum(not entry.kind and not entry.tensor.is_contiguous() for entry in cohort)


def _shares_memory(source: torch.device, target: torch.device) -> bool:
    return all(
        device.type == "cpu" or registry.backend_for(device.type).capabilities.host_memory
        for device in (source, target)
    )
