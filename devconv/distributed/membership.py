"""A module as one rank's copy: its reducer is built at its first forward pass, and again when it no longer fits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from devconv.errors import PendingBackwardError

from .agreement import agree
from .bucketed import BucketedReducer
from .collecting import Managed, Signature, collect, signature_of, warn_of_early_hooks
from .contract import unchanged
from .groups import Group, reduces_on_device
from .hosted import HostReducer
from .reducing import Flight, Options, Reducer

__all__ = ["GroupRole", "let_go"]

_built: weakref.WeakSet[GroupRole] = weakref.WeakSet()


class GroupRole:
    """A module that is replicated over a process group."""

    def __init__(self, group: Group, ignored: Sequence[nn.Module], options: Options) -> None:
        self._group, self._ignored, self._options = group, tuple(ignored), options
        self._reducer: Reducer | None = None
        self._managed = Managed()
        self._signature: Signature | None = None
        self._flight = Flight()
        self._building = self._inside = False
        self.quiet = 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Build the reducer where there is none that fits, and tell it that a forward pass begins."""
        self._inside = False
        if self._building or (self.quiet and not torch.is_grad_enabled()):
            return
        if self._reducer is None or signature_of(module, self._managed.skipped) != self._signature:
            self._build(module, args, kwargs)
        assert self._reducer is not None
        if self.quiet:
            self._reducer.hold()
        else:
            self._reducer.before()
            self._inside = True

    def after(self, output: Any) -> Any:
        """Tell the reducer that the forward pass that it was told of has ended."""
        if not self._inside or self._reducer is None:
            return output
        self._inside = False
        return self._reducer.after(output)

    def release(self, module: nn.Module) -> None:
        """Take the reducer down."""
        if self._flight.in_air:
            raise PendingBackwardError(module)
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        _built.discard(self)

    def holds(self, tensors: set[int]) -> bool:
        """Whether the reducer was built for one of the tensors, given by their ids."""
        return any(id(parameter) in tensors for parameter in self._managed.parameters.values())

    def _build(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.release(module)
        self._materialize(module, args, kwargs)
        managed = collect(module, self._ignored)
        device = managed.check(module)
        warn_of_early_hooks(managed)
        kind = BucketedReducer if reduces_on_device(device.type, self._group) else HostReducer
        agree(managed, f"{kind.__name__}, {self._options}", self._group)
        with unchanged(module):
            self._reducer = kind(module, managed, self._group, self._options, self._flight)
        self._managed = managed
        self._signature = signature_of(module, managed.skipped)
        _built.add(self)

    def _materialize(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give lazy tensors their shapes before the forward pass does: a reducer is built from shapes."""
        if not any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            return
        from devconv.lazy.materialization import materialize

        self._building = True
        try:
            materialize(module, *args, fallback="forward", **kwargs)
        finally:
            self._building = False


def let_go(module: nn.Module) -> None:
    """Release every reducer that was built for a parameter of `module`, whichever module it belongs to.

    For what is about to convert `module`.

    Raises:
        PendingBackwardError: a forward pass through one of them still waits for its backward.
    """
    if not _built:
        return
    tensors = {id(parameter) for parameter in module.parameters()}
    for role in [role for role in _built if role.holds(tensors)]:
        role.release(module)
