"""The one driver: survey, plan, stage, commit, report, for the flag and for the explicit form alike."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import flag, following, registry
from . import torch_internals as internals
from .commit import Commit
from .contexts import run_with
from .entries import Entry, Kind
from .errors import ConversionError, ConversionRefused, NotAModuleError, PartialConversionError
from .nested import move_nested
from .patches import Patch
from .planning import Flags, Plan, cohorts_of, decide_result, items_of, make_plan, settled
from .policy import Route
from .report import Report
from .staging import ask, stage
from .survey import Inventory, survey, walk
from .transfer import Transfer, capture, recognise

__all__ = ["APPLY", "convert", "last_report", "move", "plan", "prepare", "running", "through_door"]

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

_log = logging.getLogger("devconv")
_commits = threading.RLock()
"""Commits take turns: two models may share a tensor."""
_running: ContextVar[Commit | str | None] = ContextVar("devconv_conversion", default=None)
_STOCK = "stock"
_thread = threading.local()

_TO_ARGUMENTS = (torch.device, torch.dtype, torch.Tensor, int, type(None))

BATCH_BYTES = 64 * 2**20
"""What ``atomic=False`` converts at a time, in bytes."""


def running() -> bool:
    """Whether a conversion is under way in this context."""
    return _running.get() is not None


@dataclass(frozen=True)
class _Request:
    """One conversion as it was asked for."""

    module: nn.Module
    fn: Callable[[Tensor], Tensor]
    recurse: bool = True
    entered: bool = False
    """The root's own ``_apply`` is already running: it called the base class."""
    optimizers: list[Optimizer] = field(default_factory=list)
    atomic: bool = True


def _apply(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(stock)
    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        current = _running.get()
        if isinstance(current, Commit):
            return current.join(self, fn, recurse)
        if current is None and flag.active():
            run(_Request(self, fn, recurse, entered=True))
            return self
        return stock(self, fn, recurse)

    return apply


APPLY = Patch(nn.Module, internals.APPLY, _apply)


def through_door(
    module: nn.Module, name: str, stock: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> nn.Module:
    """A front door of ``nn.Module``, with the flag on."""
    if name == "to":
        asked = kwargs.get("device", args[0] if args else None)
        if isinstance(asked, str | bool) or not isinstance(asked, _TO_ARGUMENTS):
            # A vendor's device has a name that torch can parse only after its library was loaded; and torch itself
            # takes a number for a tensor of its dtype, so that `.to(3.5)` makes a float64 model.
            registry.resolve(asked)
    fn, recurse = capture(stock, args, kwargs)
    if fn is None:
        return stock(module, *args, **kwargs)
    _, returned = run(_Request(module, fn, recurse))
    return returned


def run(request: _Request) -> tuple[Report, nn.Module]:
    """Carry out one conversion.

    Returns:
        The report, and what the module's own ``_apply`` returned (the module, as a rule).
    """
    started = time.perf_counter()
    transfer = recognise(request.fn)
    if transfer is not None and transfer.device is not None:
        device, backend = registry.resolve(transfer.device)
        transfer = transfer.on(device)
        backend.prepare()
    inventory = walk(request.module, request.recurse, entered=request.entered)
    if transfer is not None and settled(inventory, transfer):
        # The parameters may have come here earlier, without their optimizers.
        notes: list[str] = []
        following.reconcile_all(request.optimizers, notes)
        elapsed = time.perf_counter() - started
        _thread.report = report = Report(tuple, str(transfer), seconds=elapsed, notes=notes)
        return report, request.module
    # Under inference_mode the new tensors would be inference tensors, and the model could never be trained again.
    ordinary = torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()
    with _commits, ordinary:
        report, returned = _convert(request, inventory, transfer, started)
    _thread.report = report
    _log.debug("%r", report)
    return report, returned


def _convert(
    request: _Request, inventory: Inventory, transfer: Transfer | None, started: float
) -> tuple[Report, nn.Module]:
    survey(inventory)
    if not request.atomic or not _goes_by_crowds(transfer):
        inventory.expand()
    try:
        with _set_aside(inventory) as derived:
            # Left by a forward under autocast; a TensorImpl that they point to weakly cannot be swapped.
            torch.clear_autocast_cache()
            opaque = transfer is None
            asked = inventory.entries if opaque else [entry for entry in inventory.entries if _knows_better(entry)]
            results = _ask(asked, request.fn)
            made = make_plan(inventory, transfer or Transfer(), results, opaque=opaque)
            if made.refusals:
                refusals = made.refusals
                made.release()
                raise ConversionRefused(refusals)
            if made.stock:
                return _run_stock(request, made, started)
            rows = None
            if request.atomic or opaque:
                if transfer is not None:
                    stage(made.cohorts, transfer, request.fn, made.crowds)
                commit, returned = _commit(request, made, derived)
            else:
                rows = items_of(inventory)  # each batch lets go of its tensors
                commit, returned = _commit_in_batches(request, made, transfer or Transfer(), derived)
            report = Report(
                rows or items_of(inventory),
                made.what,
                seconds=time.perf_counter() - started,
                holders=made.holders,
                ghosts=commit.ghosts,
                notes=made.notes,
            )
            made.release()
            return report, returned
    finally:
        inventory.release()


def _goes_by_crowds(transfer: Transfer | None) -> bool:
    """Whether tensors that nothing distinguishes can be converted all at once: a plain copy to elsewhere, by swap or in
    place."""
    return (
        transfer is not None
        and not transfer.empty
        and transfer.memory_format is None
        and not internals.fake_mode_is_active()
        and not Flags.current().overwrite
        and not (transfer.device is not None and internals.has_own_class(transfer.device))
    )


def _knows_better(entry: Entry) -> bool:
    """Whether only the tensor's class can tell what a conversion is to it, and whether there is anything to do."""
    return entry.kind is Kind.WRAPPER or (entry.kind is Kind.CUSTOM and internals.converts_itself(type(entry.tensor)))


def _ask(entries: Iterable[Entry], fn: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """The function's own answer for every one of the tensors, by its id, before anything is committed."""
    results: dict[int, Tensor] = {}
    with torch.no_grad():
        for entry in entries:
            result = ask(entry.tensor, fn)
            if not isinstance(result, Tensor):
                raise TypeError(f"the function returned a {type(result).__qualname__} for {entry.name}, not a tensor")
            if result is not entry.tensor and id(entry.tensor) in internals.views_of([result]):
                # Its data alone: a view would hold the very tensor whose place it is to take.
                result = result.data
            results[id(entry.tensor)] = result
            if result is not entry.tensor:
                entry.staged = result
    return results


def _commit(request: _Request, made: Plan, derived: list[_Derived]) -> tuple[Commit, nn.Module]:
    def steps(commit: Commit) -> nn.Module:
        commit.run(made.cohorts, made.crowds)
        return _complete(request, commit, made, derived)

    return _carry_out(request, made, steps, [], derived)


def _commit_in_batches(
    request: _Request, made: Plan, transfer: Transfer, derived: list[_Derived]
) -> tuple[Commit, nn.Module]:
    """``atomic=False``: the extra memory is that of one batch; a failure leaves earlier batches converted."""
    converted: list[str] = []

    def steps(commit: Commit) -> nn.Module:
        for batch in made.inventory.batches(BATCH_BYTES):
            cohorts = cohorts_of(batch)
            stage(cohorts, transfer, request.fn)
            commit.run(cohorts)
            following.log_moves(commit.moves(), automatic=flag.active())
            commit.finish()
            converted.extend(
                entry.name for entry in batch if entry.decision.route is not Route.KEEP and not entry.inside
            )
            for entry in batch:
                if not entry.inside:
                    entry.let_go()
        return _complete(request, commit, made, derived)

    return _carry_out(request, made, steps, converted, derived)


def _carry_out(
    request: _Request,
    made: Plan,
    steps: Callable[[Commit], nn.Module],
    converted: list[str],
    derived: list[_Derived],
) -> tuple[Commit, nn.Module]:
    """Take steps that change the model, and take them back if one fails.

    Args:
        request: the conversion.
        made: its plan.
        steps: change the model; return what the root's own ``_apply`` returned.
        converted: grows with the names of what stays converted whatever comes.
        derived: attributes that have to fit what stays converted.
    """
    commit = Commit(made.inventory, request.fn, lambda entry, result: decide_result(made, entry, result))
    try:
        returned = run_with(_running, commit, lambda: steps(commit))
    except BaseException as error:
        # Here and not in a function: Python delivers interrupts at the entry of functions, also of one that would
        # catch them.
        while not commit.undone:
            try:
                commit.undo()
            except KeyboardInterrupt:
                _log.warning("interrupted while undoing a conversion; the undo goes on")
        commit.forget()
        if not converted:
            error.add_note("devconv put the model back as it was before the conversion")
            raise
        for attribute in derived:
            attribute.derive(commit)
        if not isinstance(error, Exception):
            error.add_note(f"converted before it, with atomic=False: {', '.join(converted)}")
            raise
        raise PartialConversionError(converted, error) from error
    commit.finish()
    return commit, returned


def _complete(request: _Request, commit: Commit, made: Plan, derived: list[_Derived]) -> nn.Module:
    """What comes after the tensors: modules that convert themselves, derived attributes, optimizers."""
    returned = _enter_overriding(request, commit)
    for attribute in derived:
        attribute.derive(commit)
    _follow(request, commit, made)
    return returned


def _enter_overriding(request: _Request, commit: Commit) -> nn.Module:
    returned: nn.Module = request.module
    if not commit.inventory.overriding:
        return returned
    with APPLY.held():
        for module in commit.inventory.overriding:
            result = commit.enter(module)
            if module is request.module and isinstance(result, nn.Module):
                returned = result
    return returned


def _follow(request: _Request, commit: Commit, made: Plan) -> None:
    following.log_moves(commit.moves(), automatic=flag.active(), journal=commit.then)
    optimizers = list(request.optimizers)
    if flag.active() and commit.overwrote:
        # They hold objects that the model no longer has: waiting for the next step would be too late for whatever reads
        # their gradients before it, such as GradScaler and gradient clipping.
        optimizers += following.optimizers_alive()
    for optimizer in optimizers:
        following.reconcile(optimizer, made.notes, commit.then)


def _run_stock(request: _Request, made: Plan, started: float) -> tuple[Report, nn.Module]:
    rows = items_of(made.inventory)
    # The module's own _apply, unless it is the one that is running.
    apply = (
        functools.partial(internals.stock_apply, request.module)
        if request.entered
        else getattr(request.module, internals.APPLY)
    )
    how = {} if request.recurse else {"recurse": False}
    returned = run_with(_running, _STOCK, lambda: apply(request.fn, **how))

    def stock_rows() -> Iterable[Any]:
        from dataclasses import replace

        return (replace(item, route=Route.STOCK) for item in rows())

    report = Report(stock_rows, made.what, seconds=time.perf_counter() - started, notes=made.notes)
    return report, returned


@dataclass
class _Derived:
    """An attribute that a forward pre-hook derives from parameters, set aside with the graph that pins them."""

    module: nn.Module
    name: str
    value: Tensor
    make: Callable[[], Tensor]

    def derive(self, commit: Commit) -> None:
        """Derive it afresh from the converted parameters, or convert what was not derived from them yet."""
        if self.value.requires_grad:
            with torch.enable_grad():
                value = self.make()
        else:
            with torch.no_grad():
                value = commit.fn(self.value)
        commit.set_attribute(self.module, self.name, value)


@contextmanager
def _set_aside(inventory: Inventory) -> Iterator[list[_Derived]]:
    derived: list[_Derived] = []
    try:
        for module, name, make in inventory.derived:
            value = vars(module).get(name)
            if isinstance(value, Tensor):
                derived.append(_Derived(module, name, value, make))
                del vars(module)[name]
        yield derived
    finally:
        for attribute in derived:
            # A failure before it was derived afresh: it never left.
            vars(attribute.module).setdefault(attribute.name, attribute.value)


def _request_to(
    module: nn.Module,
    device: str | torch.device | int | None,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None,
    non_blocking: bool,
) -> Callable[[Tensor], Tensor]:
    if not isinstance(module, nn.Module):
        raise NotAModuleError(module)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype= takes a torch.dtype, got {type(dtype).__qualname__}")
    target = None if device is None else registry.resolve(device)[0]
    fn, _ = capture(internals.stock_to, (target, dtype, non_blocking), {"memory_format": memory_format})
    assert fn is not None
    return fn


def convert(
    module: nn.Module,
    device: str | torch.device | int | None = None,
    dtype: torch.dtype | None = None,
    *,
    memory_format: torch.memory_format | None = None,
    non_blocking: bool = False,
    optimizers: Optimizer | Iterable[Optimizer] | None = None,
    atomic: bool = True,
) -> Report:
    """Convert a module in place, whole or not at all, without the flag and without any hook.

    Args:
        module: the root of what is converted.
        device: the target, None to stay.
        dtype: for floating point and complex tensors, None to keep theirs.
        memory_format: for tensors of 4 and 5 dimensions.
        non_blocking: the copies need not be complete on return.
        optimizers: those that were built on the module; their state is moved too, all or nothing. Without it, call
            `devconv.follow` before their next step.
        atomic: False bounds the extra memory of a dtype change on one device to one batch of 64 MiB; a failure then
            leaves what was converted before it, and the error lists it.

    Returns:
        What was done, tensor by tensor.

    Raises:
        NotAModuleError: `module` is none.
        InvalidDeviceError: `device` names no usable device.
        OptimizerMismatchError: an optimizer holds no parameter of `module`.
        ConversionRefused: stock torch would break something; all reasons are listed, and nothing was changed.
        ConversionError: `atomic` is False and a device would change.

    >>> layer = nn.Linear(2, 1)
    >>> weight = layer.weight
    >>> report = convert(layer, dtype=torch.float64)
    >>> layer.weight is weight, weight.dtype, dict(report.routes)
    (True, torch.float64, {<Route.SET_DATA: 'set-data'>: 2})
    """
    fn = _request_to(module, device, dtype, memory_format, non_blocking)
    if not atomic and device is not None:
        raise ConversionError(
            "", str(device), "atomic=False is for a dtype change on one device", "Leave device= out, or atomic=True."
        )
    listed = following.check_optimizers(optimizers, module)
    report, _ = run(_Request(module, fn, optimizers=listed, atomic=atomic))
    return report


def plan(
    module: nn.Module,
    device: str | torch.device | int | None = None,
    dtype: torch.dtype | None = None,
    *,
    memory_format: torch.memory_format | None = None,
    non_blocking: bool = False,
) -> Plan:
    """What `convert` would do with these arguments: routes, bytes, peak memory, refusals. Nothing is changed.

    >>> print(plan(nn.Linear(2, 1), "meta").routes)
    Counter({<Route.SWAP: 'swap'>: 2})
    """
    fn = _request_to(module, device, dtype, memory_format, non_blocking)
    transfer = recognise(fn)
    assert transfer is not None
    if transfer.device is not None:
        transfer = transfer.on(registry.resolve(transfer.device)[0])
    inventory = walk(module)
    survey(inventory)
    if not _goes_by_crowds(transfer):
        inventory.expand()
    try:
        with _set_aside(inventory):
            made = make_plan(inventory, transfer)
            made.settle()
        made.release()
    finally:
        inventory.release()
    return made


def last_report() -> Report | None:
    """The report of the last conversion in this thread, None before the first."""
    return getattr(_thread, "report", None)


def prepare(device: str | torch.device) -> torch.device:
    """Load a device's backend and start its runtime, before the first backward pass where that matters (XLA).

    Returns:
        The device with its index.

    >>> prepare("cpu")
    device(type='cpu')
    """
    resolved, backend = registry.resolve(device)
    backend.prepare()
    return resolved


def move(value: T, device: str | torch.device | int, dtype: torch.dtype | None = None, non_blocking: bool = False) -> T:
    """Nested inputs on a device, in one batch.

    Args:
        value: a tensor, or lists, tuples, dicts and dataclasses of tensors; other objects with a ``to`` method are
            asked to move themselves, anything else is returned as it is.
        device: the target.
        dtype: for floating point and complex tensors, None to keep theirs.
        non_blocking: the copies need not be complete on return.

    Returns:
        The same structure; tensors that are there already are the same objects.

    Raises:
        InvalidDeviceError: `device` names no usable device.

    >>> move({"x": [torch.ones(2)], "name": "batch"}, "meta")
    {'x': [tensor(..., device='meta', size=(2,))], 'name': 'batch'}
    """
    resolved, backend = registry.resolve(device)
    backend.prepare()
    return move_nested(value, resolved, dtype, non_blocking)
