"""The new tensors take the place of the old ones, all of them, or the model is put back as it was.

Every step is written to the journal before it is taken, and taking one back first looks whether it was taken. So the
undo can begin after any instruction, and can itself be interrupted and begun again.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor, nn

from . import following, geometry, ghost
from . import torch_internals as internals
from .crowd import Crowd
from .entries import Cohorts, Entry, Kind, Slot, Table
from .policy import Route
from .survey import Inventory, enlist

__all__ = ["Commit"]

_MISSING = object()


class Commit:
    """One model's change, with its journal.

    Args:
        inventory: decided and staged entries.
        fn: the function that ``_apply`` got.
        adopt: decides a tensor that turned up only while an overriding module was entered.
    """

    def __init__(
        self,
        inventory: Inventory,
        fn: Callable[[Tensor], Tensor],
        adopt: Callable[[Entry, Tensor], None],
    ) -> None:
        self.inventory = inventory
        self.fn = fn
        self.adopt = adopt
        self.ghosts = 0
        self.overwrote = False
        """A parameter was replaced by another object."""
        self.undone = False
        self._done: list[tuple[Entry, Any]] = []
        """Entries in the order of their turn, each with what its undo needs."""
        self._crowds: list[tuple[Crowd, list[Any]]] = []
        """As `_done`, with a column of what the undo needs."""
        self._slots: list[tuple[Table, str, Tensor]] = []
        self._linked: list[Entry] = []
        """Entries whose gradient was set anew."""
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._entered: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
        self._undos: list[Callable[[], None]] = []
        self._lookup: Callable[[Tensor], Tensor] | None = None
        self._replaced: dict[int, Entry] = {}

    # -- forward -----------------------------------------------------------------------------------------------------

    def run(self, cohorts: Cohorts, crowds: Sequence[Crowd] = ()) -> None:
        """Commit what stands in a module without an ``_apply`` of its own."""
        for crowd in crowds:
            _CROWD_STEPS[crowd.decision.route](self, crowd)
        grads: Cohorts = {}
        for decision, cohort in cohorts.items():
            ready = [entry for entry in cohort if not (entry.committed or entry.inside)]
            own = [entry for entry in ready if entry.owner is None]
            if len(own) < len(ready):
                grads[decision] = [entry for entry in ready if entry.owner is not None]
            _STEPS[decision.route](self, own)
        for decision, cohort in grads.items():
            _STEPS[decision.route](self, cohort)
        if self.inventory.graded:
            for entry in self.inventory.entries:
                if entry.grad is not None and (entry.committed or entry.grad.committed):
                    self._link(entry)

    def commit(self, entry: Entry) -> None:
        """Commit one tensor and its gradient, once."""
        for member in (entry, entry.grad):
            if member is not None and not member.committed and member.decision.route is not Route.KEEP:
                _STEPS[member.decision.route](self, [member])
        entry.committed = True
        if entry.grad is not None:
            self._link(entry)

    def _link(self, entry: Entry) -> None:
        """Make a tensor's gradient the object that it was."""
        assert entry.grad is not None
        holder, grad = self._replacement(entry), self._replacement(entry.grad)
        if holder.grad is not grad:
            self._linked.append(entry)
            holder.grad = grad

    def _replacement(self, entry: Entry) -> Tensor:
        """The object that stands in the module now."""
        return entry.staged if entry.decision.route is Route.OVERWRITE and entry.staged is not None else entry.tensor

    def _swap_crowd(self, crowd: Crowd) -> None:
        tensors, staged = crowd.tensors, crowd.staged
        for learning in compress(staged, map(attrgetter("requires_grad"), tensors)):
            learning.requires_grad_()
        self._crowds.append((crowd, internals.impls_of(tensors)))
        try:
            deque(map(internals.swap_impl, tensors, staged), maxlen=0)
        except RuntimeError as error:
            undone = map(eq, internals.impls_of(tensors), self._crowds[-1][1])
            error.add_note(f"while swapping {next(compress(crowd.names(), undone), 'them')}")
            raise
        for tensor in internals.with_hooks(tensors):
            _relink(tensor)

    def _set_data_crowd(self, crowd: Crowd) -> None:
        self._crowds.append((crowd, [tensor.data for tensor in crowd.tensors]))
        for tensor, staged in zip(crowd.tensors, crowd.staged, strict=True):
            tensor.data = staged

    def _overwrite_crowd(self, crowd: Crowd) -> None:
        for tensor, staged in zip(crowd.tensors, crowd.staged, strict=True):
            if vars(tensor):
                carry_attributes(tensor, staged)
        self._crowds.append((crowd, crowd.tensors))
        crowd.put(crowd.staged)

    def _swap(self, entries: list[Entry]) -> None:
        done, impl_of, swap_impl, plain = self._done, internals.impl_of, internals.swap_impl, Kind.PLAIN
        chose_grad_dtype = internals.chose_grad_dtype
        bodies = bool(entries) and _has_bodies(entries[0])
        for entry in entries:
            tensor, staged = entry.tensor, entry.staged
            if tensor.requires_grad:
                staged.requires_grad_()
                if chose_grad_dtype(tensor):
                    _keep_grad_dtype(entry, staged)
            entry.committed = True
            done.append((entry, impl_of(tensor)))
            try:
                swap_impl(tensor, staged)
                if bodies:
                    internals.exchange_bodies(tensor, staged)
            except RuntimeError as error:
                error.add_note(f"while swapping {entry.name}")
                raise
            if entry.kind is not plain:
                self._carry_result(entry, staged)
            _relink(tensor)
            if entry.live and (tensor.requires_grad or ghost.thaw(staged)):
                ghost.attach(staged, tensor)
                self.ghosts += 1

    def _carry_result(self, entry: Entry, staged: Tensor) -> None:
        """What the result of a class's own conversion carries wins over what the tensor carried."""
        carried = vars(staged)
        if carried:
            before = dict(vars(entry.tensor))
            self._undos.append(lambda: _restore_dict(vars(entry.tensor), before))
            vars(entry.tensor).update(carried)

    def _full_swap(self, entries: list[Entry]) -> None:
        for entry in entries:
            tensor, staged = entry.tensor, entry.staged
            if isinstance(tensor, nn.Parameter) and not isinstance(staged, nn.Parameter):
                staged = entry.staged = nn.Parameter(staged, requires_grad=tensor.requires_grad)
            attributes = dict(vars(tensor))
            entry.committed = True
            self._done.append((entry, internals.impl_of(tensor)))
            torch.utils.swap_tensors(tensor, staged)
            for name, value in attributes.items():
                vars(tensor).setdefault(name, value)
            _relink(tensor)

    def _set_data(self, entries: list[Entry]) -> None:
        done = self._done
        for entry in entries:
            tensor = entry.tensor
            entry.committed = True
            done.append((entry, tensor.data))
            tensor.data = entry.staged

    def _overwrite(self, entries: list[Entry]) -> None:
        slots, replaced = self._slots, self._replaced
        for entry in entries:
            tensor, staged = entry.tensor, entry.staged
            if entry.parameter:
                new = self._new_parameter(entry)
            elif _has_bodies(entry):
                new = staged
                for name, value in internals.without_body(tensor).items():
                    vars(new).setdefault(name, value)
            else:
                # What a class's own conversion returns keeps the class that it chose.
                new = (
                    staged if type(staged) is not Tensor or type(tensor) is Tensor else staged.as_subclass(type(tensor))
                )
                if vars(tensor) or type(tensor) is not Tensor:
                    carry_attributes(tensor, new)
            entry.staged = new
            entry.committed = True
            replaced[id(new)] = entry
            if entry.more is None:
                slots.append((entry.table, entry.key, tensor))
                entry.table[entry.key] = new
            else:
                for slot in entry.slots:
                    slots.append((slot.table, slot.key, tensor))
                    slot.table[slot.key] = new

    def _new_parameter(self, entry: Entry) -> Tensor:
        tensor = entry.tensor
        new = internals.make_like(tensor, entry.staged)
        if entry.group is not None:
            geometry.succeed(entry.staged, new)
        hooks = internals.accumulate_hooks(tensor)
        internals.set_backward_hooks(new, internals.backward_hooks(tensor))
        internals.set_accumulate_hooks(new, hooks)
        if entry.kind is Kind.CUSTOM:
            vars(new).update(vars(entry.staged))
        carry_attributes(tensor, new)
        if tensor.requires_grad and internals.chose_grad_dtype(tensor):
            _keep_grad_dtype(entry, new)
        self._done.append((entry, (hooks,)))
        self.overwrote = True
        if entry.live and tensor.requires_grad:
            ghost.attach(tensor, new)
            self.ghosts += 1
        return new

    # -- modules that bring their own _apply -------------------------------------------------------------------------

    def enter(self, module: nn.Module) -> object:
        """Call an overriding module's own ``_apply``, with a look-up in place of the function.

        Returns:
            What it returned.
        """
        for inner in module.modules():
            self._entered.append((inner, dict(vars(inner)), _containers(inner)))
        return getattr(module, internals.APPLY)(self.lookup)

    @property
    def lookup(self) -> Callable[[Tensor], Tensor]:
        """The caller's function, answered from what is staged already; the real function for any other tensor."""
        if self._lookup is None:
            fn = self.fn

            @functools.wraps(fn)
            def lookup(tensor: Tensor) -> Tensor:
                entry = self._entry_of(tensor)
                if entry is None:
                    return fn(tensor)
                if entry.committed:
                    return self._replacement(entry)
                return entry.staged if entry.staged is not None else tensor

            # torchmetrics reads the name out of str(fn), which functools.wraps alone does not carry.
            self._lookup = lookup
        return self._lookup

    def _entry_of(self, tensor: Tensor) -> Entry | None:
        return self.inventory.by_id.get(id(tensor)) or self._replaced.get(id(tensor))

    def join(self, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
        """An overriding module's call of the base class: commit its tensors, with whatever function it brings."""
        if recurse:
            for child in module.children():
                getattr(child, internals.APPLY)(fn)
        for table in (internals.parameters_of(module), internals.buffers_of(module)):
            for key, tensor in list(table.items()):
                if tensor is not None:
                    self._join_tensor(tensor, Slot((module, ""), table, key), fn)
        return module

    def _join_tensor(self, tensor: Tensor, slot: Slot, fn: Callable[[Tensor], Tensor]) -> None:
        entry = self._entry_of(tensor)
        if entry is None:
            self._join_stranger(tensor, slot, fn)
            return
        if entry.committed:
            return
        with torch.no_grad():
            result = fn(tensor)
        if result is not entry.staged or entry.staged is None:
            if result is tensor:
                return
            entry.staged = result
            self.adopt(entry, result)
        if entry.grad is not None and not entry.grad.committed:
            with torch.no_grad():
                moved = fn(entry.grad.tensor)
            if moved is not entry.grad.staged and moved is not entry.grad.tensor:
                entry.grad.staged = moved
                self.adopt(entry.grad, moved)
        self.commit(entry)

    def _join_stranger(self, tensor: Tensor, slot: Slot, fn: Callable[[Tensor], Tensor]) -> None:
        """A tensor that the survey did not see: one that the override has just registered, or one of a module that it
        keeps elsewhere. It is asked for first: the look-up would answer for an entry."""
        grad = tensor.grad if tensor.is_leaf and not internals.is_lazy_class(type(tensor)) else None
        with torch.no_grad():
            result = fn(tensor)
            moved = fn(grad) if grad is not None else None
        if result is tensor and moved is grad:
            return
        entry = enlist(self.inventory, tensor, slot)
        for member, staged in ((entry, result), (entry.grad, moved)):
            if member is not None and staged is not None:
                if staged is not member.tensor:
                    member.staged = staged
                self.adopt(member, staged)
        self.commit(entry)

    # -- what hangs on the tensors -----------------------------------------------------------------------------------

    def set_attribute(self, module: nn.Module, name: str, value: object) -> None:
        """Set a module's plain attribute, journaled."""
        self._attributes.append((module, name, vars(module).get(name, _MISSING)))
        vars(module)[name] = value

    def then(self, undo: Callable[[], None]) -> None:
        """Add an undo for a step taken elsewhere; it must bear being called twice."""
        self._undos.append(undo)

    def moves(self) -> list[following.Move]:
        """Where the parameters were, for the optimizers that hold them."""
        moves = [
            following.Move(
                crowd.decision.device,
                crowd.decision.dtype,
                following.Owners(crowd.tensors, crowd.homes, crowd.owners, crowd.keys),
                {},
            )
            for crowd, _ in self._crowds
            if crowd.parameter
        ]
        cohorts: Cohorts = {}
        for entry, _ in self._done:
            if entry.owner is None:
                cohorts.setdefault(entry.decision, []).append(entry)
        for decision, cohort in cohorts.items():
            tensors = [entry.tensor for entry in cohort]
            homes, keys = [entry.home for entry in cohort], [entry.key for entry in cohort]
            owners = following.Owners(tensors, homes, range(len(cohort)), keys)
            successors = {
                id(entry.tensor): (weakref.ref(entry.tensor), weakref.ref(self._replacement(entry)))
                for entry in cohort
                if decision.route is Route.OVERWRITE
            }
            moves.append(following.Move(decision.device, decision.dtype, owners, successors))
        return moves

    # -- back --------------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Put everything back: objects, values, grads, hooks, attributes. Can be begun again after an interrupt."""
        for undo in reversed(self._undos):
            undo()
        for module, attributes, containers in reversed(self._entered):
            _restore_dict(vars(module), attributes)
            for container, content in containers:
                _restore_content(container, content)
        for module, name, value in reversed(self._attributes):
            if value is _MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
        for table, key, tensor in reversed(self._slots):
            table[key] = tensor
        for crowd, column in reversed(self._crowds):
            _CROWD_UNDO[crowd.decision.route](crowd, column)
        for entry, before in reversed(self._done):
            _UNDO[entry.decision.route](entry, before)
        for entry in [*self._linked, *(entry for entry, _ in self._done)]:
            grad = entry.grad
            if grad is not None and entry.tensor.grad is not grad.tensor:
                entry.tensor.grad = grad.tensor
        self.undone = True

    def finish(self) -> None:
        """Past the point of no return: let go of the old tensors, and of what spent graphs need not keep."""
        if self.ghosts:
            for entry, _ in self._done:
                if not entry.spent or entry.staged is None:
                    continue
                if entry.decision.route is Route.SWAP:
                    ghost.release(entry.staged)
                elif sys.getrefcount(entry.tensor) == _OURS:
                    # Overwritten, and nobody else's any more: an optimizer or a list may still use the old object.
                    ghost.release(entry.tensor)
        self.forget()

    def forget(self) -> None:
        """Let go of every tensor: the look-up refers to the commit, which would wait for the cyclic collector."""
        self._lookup = None
        self._replaced.clear()
        for crowd, _ in self._crowds:
            crowd.staged = []
        for journal in (
            self._slots,
            self._done,
            self._crowds,
            self._linked,
            self._undos,
            self._entered,
            self._attributes,
        ):
            journal.clear()


def _keep_grad_dtype(entry: Entry, new: Tensor) -> None:
    """What was said of the gradient's dtype lies in the TensorImpl (torch 2.10 and newer)."""
    grad = entry.grad
    new.grad_dtype = entry.tensor.grad_dtype if grad is None else grad.decision.to_dtype


def _has_bodies(entry: Entry) -> bool:
    """Whether the tensor's data lies in a Python object of a vendor's class, before or after."""
    return internals.has_own_class(entry.decision.target) or internals.has_own_class(entry.decision.device)


_OURS = 2
"""References to an entry's tensor that are the entry's and the call's own."""


def _relink(tensor: Tensor) -> None:
    """Make autograd read the hook dicts that stayed with the object; they were registered on the old TensorImpl."""
    hooks = internals.backward_hooks(tensor)
    if hooks is not None:
        internals.set_backward_hooks(tensor, hooks)
    hooks = internals.accumulate_hooks(tensor)
    if hooks is not None:
        internals.set_accumulate_hooks(tensor, hooks)


def carry_attributes(old: Tensor, new: Tensor) -> None:
    """Give `new` the Python attributes and slots of `old` that it does not bring itself."""
    for name, value in vars(old).items():
        vars(new).setdefault(name, value)
    if type(old) in (Tensor, nn.Parameter):
        return
    for name in internals.slot_names(type(old)):
        if hasattr(old, name) and not hasattr(new, name):
            setattr(new, name, getattr(old, name))


def _undo_swap(entry: Entry, before: int | None) -> None:
    tensor, staged = entry.tensor, entry.staged
    if before is None or staged is None:
        return
    if internals.impl_of(tensor) != before:
        internals.swap_impl(tensor, staged)
        if _has_bodies(entry):
            internals.exchange_bodies(tensor, staged)
        if entry.live and tensor.requires_grad and not staged.requires_grad:
            # A ghost that was thawed is the frozen parameter's TensorImpl again.
            tensor.requires_grad_(False)
    # Both dicts, also where there is none: the delivery of a ghost may hang on the TensorImpl that came back.
    internals.set_backward_hooks(tensor, internals.backward_hooks(tensor))
    internals.set_accumulate_hooks(tensor, internals.accumulate_hooks(tensor))


def _undo_swap_crowd(crowd: Crowd, before: list[int]) -> None:
    for tensor, staged, impl in zip(crowd.tensors, crowd.staged, before, strict=True):
        if internals.impl_of(tensor) != impl:
            internals.swap_impl(tensor, staged)


def _undo_set_data_crowd(crowd: Crowd, before: list[Tensor]) -> None:
    for tensor, data in zip(crowd.tensors, before, strict=True):
        tensor.data = data


def _undo_overwrite_crowd(crowd: Crowd, before: list[Tensor]) -> None:
    crowd.put(before)


def _undo_full_swap(entry: Entry, before: int | None) -> None:
    if before is not None and entry.staged is not None and internals.impl_of(entry.tensor) != before:
        torch.utils.swap_tensors(entry.tensor, entry.staged)
        _relink(entry.tensor)


def _undo_set_data(entry: Entry, before: Tensor | None) -> None:
    if before is not None:
        entry.tensor.data = before


def _undo_overwrite(entry: Entry, before: tuple[dict[int, Callable[..., Any]] | None] | None) -> None:
    if before is not None and entry.live and entry.tensor.requires_grad:
        internals.set_accumulate_hooks(entry.tensor, before[0])


_STEPS: dict[Route, Callable[[Commit, list[Entry]], None]] = {
    Route.SWAP: Commit._swap,
    Route.RETARGET: Commit._swap,
    Route.FULL_SWAP: Commit._full_swap,
    Route.SET_DATA: Commit._set_data,
    Route.OVERWRITE: Commit._overwrite,
}
_CROWD_STEPS: dict[Route, Callable[[Commit, Crowd], None]] = {
    Route.SWAP: Commit._swap_crowd,
    Route.SET_DATA: Commit._set_data_crowd,
    Route.OVERWRITE: Commit._overwrite_crowd,
}
_CROWD_UNDO: dict[Route, Callable[[Crowd, list[Any]], None]] = {
    Route.SWAP: _undo_swap_crowd,
    Route.SET_DATA: _undo_set_data_crowd,
    Route.OVERWRITE: _undo_overwrite_crowd,
}
_UNDO: dict[Route, Callable[[Entry, Any], None]] = {
    Route.SWAP: _undo_swap,
    Route.RETARGET: _undo_swap,
    Route.FULL_SWAP: _undo_full_swap,
    Route.SET_DATA: _undo_set_data,
    Route.OVERWRITE: _undo_overwrite,
}


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """The module's lists, dicts and sets, each with a copy of its content."""
    return [(value, value.copy()) for value in vars(module).values() if isinstance(value, list | dict | set)]


def _restore_dict(table: dict[str, Any], before: dict[str, Any]) -> None:
    # Not compared first: comparing tensors is a computation.
    table.clear()
    table.update(before)


def _restore_content(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)
