"""Gradients of graphs that were recorded before a swap.

After a swap such a graph still holds the old TensorImpl, the ghost, and would leave its gradient there. A hook on the
ghost delivers it to the parameter instead, in the dtype and on the device that the parameter has at that moment.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from . import torch_internals as internals

__all__ = ["attach", "release", "thaw"]


def thaw(ghost: Tensor) -> bool:
    """Whether a graph from before a parameter was frozen still brings its ghost a gradient.

    The ghost then takes it: the parameter may be unfrozen by that time. One that is still frozen gets none.
    """
    if ghost.is_inference() or not (ghost.is_floating_point() or ghost.is_complex()):
        return False
    ghost.requires_grad_()
    if internals.has_accumulator(ghost):
        return True
    ghost.requires_grad_(False)
    return False


def attach(ghost: Tensor, parameter: Tensor) -> None:
    """Deliver the gradients that arrive at `ghost` to `parameter`, and call its post-accumulate hooks with it, once.

    The ghost is kept alive by the graph alone, and goes with it.
    """
    # Weakly: a graph that is never run must not keep a dropped model's parameters.
    current = weakref.ref(parameter)
    # A dict of hooks that is there already is the ghost's too; one that is made later would be the parameter's alone.
    shares_hooks = internals.backward_hooks(parameter) is not None

    def deliver(source: Tensor) -> None:
        gradient, source.grad = source.grad, None
        target = current()
        if target is None or gradient is None or not target.requires_grad:
            return
        with torch.set_grad_enabled(gradient.requires_grad):
            arrived = gradient.to(target.device, target.dtype)
            if not shares_hooks:
                for hook in list((internals.backward_hooks(target) or {}).values()):
                    changed = hook(arrived)
                    arrived = arrived if changed is None else changed
            if target.grad is None:
                target.grad = arrived
            elif target.grad.layout is not torch.strided and arrived.layout is torch.strided:
                # As torch accumulates: a sparse gradient takes no dense one.
                target.grad = arrived + target.grad
            elif gradient.requires_grad:
                target.grad = target.grad + arrived
            else:
                target.grad += arrived
        if internals.use_count(source) == _UNSAVED:
            release(source)
        for hook in list((internals.accumulate_hooks(target) or {}).values()):
            hook(target)

    # The gradient that was there went to the parameter; what arrives from now on is to be added to it once.
    ghost.grad = None
    internals.set_accumulate_hooks(ghost, {0: deliver})


_UNSAVED = 2
"""Uses of a ghost that no saved tensor holds: its Python object and the node that accumulates its gradient."""


def release(ghost: Tensor) -> None:
    """Give up the storage of a ghost whose graph saved nothing of it.

    A ``loss`` that is still held in a variable keeps its graph, and the graph every ghost; of an old model that nobody
    can use any more, only shapes are left.
    """
    shape = ghost.shape
    ghost.data = torch.empty((), device=ghost.device, dtype=ghost.dtype).expand(shape)
