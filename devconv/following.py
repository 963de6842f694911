"""Optimizers follow their parameters.

Moves that keep parameters' identity need no relinking, but an optimizer's state is still where the parameters were.
Each move is logged: what the parameter was, by the module that owns it, since a weak reference to the parameter itself
would forbid stock torch's own swap. State that was where its parameter was goes where the parameter is; state that
somebody put elsewhere (offloaded, or float32 beside bfloat16 parameters) stays.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import torch_internals as internals
from .errors import OptimizerMismatchError
from .patches import Patch

__all__ = ["BIRTH", "Move", "Owners", "check_optimizers", "follow", "log_moves", "reconcile", "reconcile_all"]

_log = logging.getLogger("devconv")


class Owners:
    """The module and the key of each of ``T`` tensors, by the tensor's id; nothing is held.

    Args:
        tensors: ``T`` tensors.
        homes: ``M`` modules, each with its prefix.
        owners: the place in `homes` of the module of each tensor.
        keys: the key of each in its module's table.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        homes: Sequence[tuple[nn.Module, str]],
        owners: Sequence[int],
        keys: Sequence[str],
    ) -> None:
        self.places = dict(zip(map(id, tensors), range(len(tensors)), strict=True))
        self._modules = list(map(weakref.ref, map(itemgetter(0), homes)))
        self._owners = owners
        self._keys = keys

    def has(self, tensor: Tensor) -> bool:
        """Whether this very object was moved: its id may have passed to another one since."""
        place = self.places.get(id(tensor))
        module = None if place is None else self._modules[self._owners[place]]()
        if place is None or module is None:
            return False
        key = self._keys[place]
        if internals.parameters_of(module).get(key) is tensor or internals.buffers_of(module).get(key) is tensor:
            return True
        # Pruning and parametrizations give it another key, or another place below.
        return any(other is tensor for other in (*module.parameters(), *module.buffers()))

    def are_gone(self) -> bool:
        """Whether none of the modules is alive."""
        return all(module() is None for module in self._modules)


@dataclass(frozen=True)
class Move:
    """Parameters that one conversion took away from one place.

    Attributes:
        device: where they were.
        dtype: what they were.
        owners: where they stand.
        successors: after an overwrite: the old object and the new one, by the old one's id.
    """

    device: torch.device
    dtype: torch.dtype
    owners: Owners
    successors: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]]

    def took(self, parameter: Tensor) -> bool:
        """Whether this very object was moved."""
        if id(parameter) in self.successors:
            return self.successors[id(parameter)][0]() is parameter
        return self.owners.has(parameter)

    def is_gone(self) -> bool:
        """Whether no optimizer can ask for it any more."""
        return self.owners.are_gone()


_lock = threading.RLock()
_moves: list[tuple[int, Move]] = []
"""In order, each with the number of its conversion."""
_number = 0
_seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The conversion that an optimizer was brought up to, or was made after."""
_unfused: weakref.WeakKeyDictionary[Optimizer, dict[int, bool | None]] = weakref.WeakKeyDictionary()
"""The groups, by their index, that were fused before a device without such kernels, with their ``foreach`` then."""
_hook: torch.utils.hooks.RemovableHandle | None = None


def log_moves(
    moves: list[Move], *, automatic: bool, journal: Callable[[Callable[[], None]], None] | None = None
) -> None:
    """Remember where parameters have been, so that optimizers can follow.

    Args:
        moves: one conversion's moves.
        automatic: optimizers follow by themselves at their next step: the flag is on.
        journal: takes a function that forgets them again, before they are logged; it may be called more than once.
    """
    global _number, _hook
    if not moves:
        return
    with _lock:
        before = [(logged, dict(logged[1].successors)) for logged in _moves]

        def undo() -> None:
            with _lock:
                for (_, move), successors in before:
                    move.successors.update(successors)
                _moves[:] = [logged for logged, _ in before]

        if journal is not None:
            journal(undo)
        _number += 1
        # A round trip that is made again and again is one entry: what counts is the last time.
        _moves[:] = [
            (number, old) for number, old in _moves if not (old.is_gone() or any(_covers(new, old) for new in moves))
        ]
        successors = {number: new for move in moves for number, (_, new) in move.successors.items()}
        if successors:
            _skip_generation(successors)
        _moves.extend((_number, move) for move in moves)
        if automatic and _hook is None:
            # It stays when the flag's scope ends: the next step may come after that, and would meet state that was
            # left behind.
            _hook = register_optimizer_step_pre_hook(_before_step)


def _born(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        with _lock:
            _seen.setdefault(self, _number)

    return init


BIRTH = Patch(Optimizer, "__init__", _born)
"""Notes when an optimizer is made: what it keeps elsewhere than its parameters, made after a move, it keeps on purpose."""


def _skip_generation(successors: dict[int, weakref.ref[Tensor]]) -> None:
    """A parameter that was overwritten before has a new successor: nobody need hold the one in between."""
    for _, move in _moves:
        for number, (old, between) in move.successors.items():
            if (parameter := between()) is not None and id(parameter) in successors:
                move.successors[number] = old, successors[id(parameter)]


def _covers(new: Move, old: Move) -> bool:
    return (
        not old.successors
        and (new.device, new.dtype) == (old.device, old.dtype)
        and new.owners.places.keys() == old.owners.places.keys()
    )


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _seen.get(optimizer) != _number:
        reconcile(optimizer)


def follow(*optimizers: Optimizer) -> None:
    """Let optimizers catch up with every conversion since their last step.

    With the flag set this happens by itself at the next step; call it after `devconv.convert` without
    ``optimizers=``, or before reading an optimizer's state between a move and the next step.

    Args:
        optimizers: optimizers that were built on parameters which have been converted since.

    Raises:
        OptimizerMismatchError: one of them is no optimizer.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise OptimizerMismatchError(optimizer, "is no torch.optim.Optimizer")
    reconcile_all(optimizers, [])


def reconcile_all(optimizers: Iterable[Optimizer], notes: list[str]) -> None:
    """`reconcile` for several: all of them, or none."""
    undos: list[Callable[[], None]] = []
    try:
        for optimizer in optimizers:
            reconcile(optimizer, notes, undos.append)
    except BaseException:
        for undo in reversed(undos):
            undo()
        raise


def optimizers_alive() -> list[Optimizer]:
    """Every optimizer of the process: torch keeps no list of them, Python's collector does."""
    known: dict[type, bool] = {}
    return [
        thing
        for thing in gc.get_objects()
        if (known[cls] if (cls := type(thing)) in known else known.setdefault(cls, issubclass(cls, Optimizer)))
    ]


def check_optimizers(optimizers: Optimizer | Iterable[Optimizer] | None, module: nn.Module) -> list[Optimizer]:
    """The optimizers as a list, each checked to hold at least one of the module's parameters.

    Raises:
        OptimizerMismatchError: one is no optimizer, or belongs to another model.
    """
    if optimizers is None:
        return []
    several = isinstance(optimizers, list | tuple | set | frozenset | Iterator)
    listed: list[Any] = list(optimizers) if several else [optimizers]  # type: ignore[arg-type]
    parameters = {id(parameter) for parameter in module.parameters()}
    parameters |= {id(buffer) for buffer in module.buffers() if buffer.requires_grad}
    for optimizer in listed:
        if not isinstance(optimizer, Optimizer):
            raise OptimizerMismatchError(optimizer, "is no torch.optim.Optimizer")
        if not any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
            raise OptimizerMismatchError(optimizer, "holds no parameter of the module")
    return listed


def reconcile(
    optimizer: Optimizer,
    notes: list[str] | None = None,
    journal: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Bring one optimizer up to the last move.

    Args:
        optimizer: any of torch.optim's.
        notes: takes a sentence about whatever the caller should know.
        journal: takes a function that takes everything back, before anything is changed; it may be called more than
            once.
    """
    with _lock:
        since = _seen.get(optimizer, 0)
        before = _snapshot(optimizer)
        marked = _seen.get(optimizer)

        def undo() -> None:
            _restore(optimizer, before)
            with _lock:
                if marked is None:
                    _seen.pop(optimizer, None)
                else:
                    _seen[optimizer] = marked

        if journal is not None:
            journal(undo)
        try:
            # Under inference_mode the state would be of inference tensors, which no later step could write to.
            with torch.inference_mode(mode=False), torch.no_grad():
                _bring(optimizer, since, notes if notes is not None else [])
        except BaseException:
            undo()
            raise
        _seen[optimizer] = _number


def _bring(optimizer: Optimizer, since: int, notes: list[str]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        moved: list[tuple[Tensor, Places]] = []
        for position, parameter in enumerate(group["params"]):
            current, places = _trace(parameter, since)
            if not places:
                continue
            moved.append((current, places))
            if current is not parameter:
                # After an overwrite: the group's parameter becomes its successor, and takes the state with it.
                group["params"][position] = current
                if parameter in optimizer.state:
                    optimizer.state[current] = optimizer.state.pop(parameter)
        if not moved:
            continue
        # First, since it decides where `step` belongs.
        _choose_kernels(optimizer, index, group, notes)
        if isinstance(optimizer, torch.optim.LBFGS):
            # The first parameter's state is that of all of them, flat, in the dtype that they have in common.
            everywhere: Places = set().union(*(places for _, places in moved))
            moved = [(parameter, everywhere) for parameter, _ in moved]
        for parameter, places in moved:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                state[key] = _carry(value, parameter, places, group, key)
        _carry_options(group, {device for _, places in moved for device, _ in places})


Places = set[tuple[torch.device, torch.dtype]]


def _trace(parameter: Tensor, since: int) -> tuple[Tensor, Places]:
    """What a parameter is now, and where it has been since a move."""
    places: Places = set()
    for number, move in _moves:
        if move.took(parameter):
            if number > since:
                places.add((move.device, move.dtype))
            if id(parameter) in move.successors:
                successor = move.successors[id(parameter)][1]()
                if successor is None:
                    break
                parameter = successor
    return parameter, places


def _choose_kernels(optimizer: Optimizer, index: int, group: dict[str, Any], notes: list[str]) -> None:
    """A fused optimizer on a device without fused kernels is an internal assertion at its next step: it goes on with
    ``foreach``, and is fused again where there are kernels."""
    unfused = _unfused.get(optimizer, {})
    supported = internals.fused_device_types()
    lacking = next((p.device.type for p in group["params"] if p.device.type not in supported), None)
    if lacking is not None and group.get("fused"):
        _unfused[optimizer] = {**unfused, index: group.get("foreach")}
        group["fused"], group["foreach"] = False, True
        note = f"{lacking} has no fused kernels: {type(optimizer).__name__} goes on with foreach=True"
        if note not in notes:
            notes.append(note)
            _log.warning(note)
    elif lacking is None and index in unfused:
        # Unless somebody has chosen otherwise since.
        if not group.get("fused") and group.get("foreach"):
            group["fused"], group["foreach"] = True, unfused[index]
        _unfused[optimizer] = {other: foreach for other, foreach in unfused.items() if other != index}


def _carry(value: Any, parameter: Tensor, places: Places, group: dict[str, Any], key: str) -> Any:
    """State where its parameter is, recursively: LBFGS keeps tensors in lists."""
    if isinstance(value, Tensor):
        return _carry_tensor(value, parameter, places, group, key)
    if isinstance(value, dict):
        return {name: _carry(item, parameter, places, group, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_carry(item, parameter, places, group, key) for item in value]
        return items if isinstance(value, list) else type(value)(items)
    return value


def _carry_tensor(value: Tensor, parameter: Tensor, places: Places, group: dict[str, Any], key: str) -> Tensor:
    if key == "step":
        # torch keeps it on the host, unless the kernels read it: there a device-side step is slow (pytorch#74424).
        on_device = group.get("capturable") or group.get("fused")
        return value.to(parameter.device if on_device else "cpu")
    device = parameter.device if value.device in {device for device, _ in places} else value.device
    dtype = parameter.dtype if value.dtype in {dtype for _, dtype in places} and _is_cast(value) else value.dtype
    return value.to(device, dtype)


def _is_cast(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _carry_options(group: dict[str, Any], left: set[torch.device]) -> None:
    """Learning rates and betas may be tensors; those on the parameters' old device go along, in their own dtype."""
    device = group["params"][0].device
    for name, value in list(group.items()):
        if name != "params":
            carried = _carry_option(value, left, device)
            if carried is not value:
                group[name] = carried


def _carry_option(value: Any, left: set[torch.device], device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device) if value.device in left else value
    if isinstance(value, tuple):
        return tuple(_carry_option(item, left, device) for item in value)
    return value


def _snapshot(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
    states = [(parameter, state, dict(state)) for parameter, state in optimizer.state.items()]
    return groups, states, _unfused.get(optimizer, {})


def _restore(optimizer: Optimizer, before: tuple[Any, ...]) -> None:
    groups, states, unfused = before
    _unfused[optimizer] = unfused
    for group, options, parameters in groups:
        group.clear()
        group.update(options)
        group["params"][:] = parameters
    optimizer.state.clear()
    for parameter, state, content in states:
        state.clear()
        state.update(content)
        optimizer.state[parameter] = state
