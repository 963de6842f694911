"""The first forward pass of a lazy module: one thread initialises it, on the right device or not at all.

The pre-hook of a lazy module stays where it is among the module's hooks, so hooks that were put before it see the lazy
module and may change its input; only what it runs is guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from devconv import flag
from devconv import torch_internals as internals
from devconv.errors import LazyDeviceError, UninitializedTensorError

from .finishing import LOCK, finish, in_progress, stay_itself
from .naming import module_name
from .nested import tensors_in
from .pending import is_pending, lazy_tensors, target_of
from .refusing import CURE
from .sizes import own_tensors

__all__ = ["guard_call", "guard_inference", "keep_subclasses", "refuse_replicas"]


def guard_call(stock: Any) -> Callable[..., Any]:
    """``LazyModuleMixin.__call__``, which stock torch does not have: ``nn.Module``'s, with the pre-hook guarded."""
    del stock

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is one
        try:
            call = super(LazyModuleMixin, self).__call__
        except TypeError:
            # Another thread has made it what it becomes since this call began.
            return type(self).__call__(self, *args, **kwargs)
        if flag.active() and is_pending(self):
            with _guarded(self):
                return call(*args, **kwargs)
        return call(*args, **kwargs)

    return __call__


def keep_subclasses(stock: Callable[..., None]) -> Callable[..., None]:
    """The constructor of lazy modules: torch's compiler asks what a module becomes before anything else is called."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        stock(self, *args, **kwargs)
        if flag.active():
            stay_itself(self)

    return __init__


def guard_inference(stock: Callable[..., None]) -> Callable[..., None]:
    """What the pre-hook runs, and what torch's compiler calls by name."""

    @functools.wraps(stock)
    def infer(self: Any, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if not flag.active() or in_progress(module):
            return stock(self, module, args, kwargs)
        with LOCK:
            if is_pending(module):
                args, kwargs = tuple(args), dict(kwargs or {})
                _check_device(module, args, kwargs)
                finish(module, args, kwargs)
        return None

    return infer


def refuse_replicas(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What ``DataParallel`` asks of every module. A subclass that stayed what it is can be replicated."""

    @functools.wraps(stock)
    def replicate(self: nn.Module) -> Any:
        if not flag.active():
            return stock(self)
        if is_pending(self):
            names = [entry.name for entry in lazy_tensors(self, module_name(self).split(" ")[0])]
            raise UninitializedTensorError(names, "replicating a module", CURE)
        return getattr(super(LazyModuleMixin, self), internals.REPLICATE)()

    return replicate


class _Guard:
    """Stands in for a lazy module's pre-hook while calls are running."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # A thread that was late gets no kwargs: the hook's entry among those with kwargs is gone already.
        with LOCK:
            if is_pending(module):
                internals.infer_parameters(module, args, kwargs or {})


@contextmanager
def _guarded(module: nn.Module) -> Iterator[None]:
    hooks = internals.pre_hooks_of(module)
    with LOCK:
        handle = internals.pending_handle(module)
        key = -1 if handle is None else handle.id
        if key in hooks:
            hook = hooks[key]
            guard = hook if isinstance(hook, _Guard) else _Guard(hook)
            hooks[key] = guard
            guard.calls += 1
    try:
        yield
    finally:
        with LOCK:
            current = hooks.get(key)
            if isinstance(current, _Guard):
                current.calls -= 1
                if current.calls == 0:
                    hooks[key] = current.hook


def _check_device(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Torch gives the tensors their storage, and then fails in the first operation with the module half of each."""
    targets = {target_of(tensor)[0] for tensor in own_tensors(module).values() if is_lazy(tensor)}
    if len(targets) != 1:
        return
    (target,) = targets
    inputs = [leaf.device for leaf in tensors_in((args, kwargs)) if leaf.dim() > 0]
    if inputs and target not in map(_indexed, inputs) and _indexed(target) not in map(_indexed, inputs):
        raise LazyDeviceError(module_name(module), str(inputs[0]), str(target))


def _indexed(device: torch.device) -> torch.device:
    return torch.device(device.type, 0) if device.index is None and device.type not in ("cpu", "meta") else device
