"""Which tensors of a module are replicated, whether they can be, and how to see that they are no longer the same.

A sub-module that is ignored, or that another API manages (FSDP, DistributedDataParallel, a composable API of torch's,
an inner `replicate`), is left out with everything below it; a tensor that is shared with such a sub-module is left to
it, so that every gradient is averaged once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from devconv import torch_internals as internals
from devconv.errors import Refusal, ReplicationRefused

__all__ = ["MARK", "Managed", "Signature", "collect", "manager_of", "signature_of", "warn_of_early_hooks"]

MARK = "_devconv_replication"
"""The key in a replicated module's ``__dict__`` under which its state hangs."""

_COMPOSABLE = frozenset({"fully_shard", "replicate"})


@dataclass
class Managed:
    """The tensors of one module that its reducer looks after.

    Attributes:
        parameters: by full name, each tensor once, in the module's order; frozen ones too.
        buffers: by full name, each tensor once.
        skipped: ids of the sub-modules that were left out, each the top of its tree.
        elsewhere: ids of the tensors that belong to a module left out.
        shared: full names under which kept modules hold such tensors.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    elsewhere: set[int] = field(default_factory=set)
    shared: list[str] = field(default_factory=list)

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that get gradients."""
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]

    def walk(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The kept modules under `module` with their full names, each once, in the order of ``named_modules()``."""
        return _walk(module, self.skipped)

    def buffers_now(self, module: nn.Module) -> list[Tensor]:
        """The buffers as they are now: a forward pass may have put a new tensor in a buffer's place."""
        found: dict[int, Tensor] = {}
        for _, owner in self.walk(module):
            for buffer in internals.buffers_of(owner).values():
                if buffer is not None and id(buffer) not in self.elsewhere:
                    found[id(buffer)] = buffer
        return [*found.values()]

    def check(self, module: nn.Module) -> torch.device:
        """Refuse what cannot be replicated, with all reasons at once; otherwise the device of the first tensor.

        Raises:
            ReplicationRefused: a tensor is lazy, on meta, sharded or on another device type than the others; or
                nothing is trained.
        """
        trained = self.trained
        home = (trained or [*self.parameters.values()] or [torch.empty(0)])[0].device
        reasons = [
            reason
            for name, tensor in (*self.parameters.items(), *self.buffers.items())
            if (reason := _refusal(name, tensor, home)) is not None
        ]
        if not trained and not reasons:
            reasons.append(
                Refusal(
                    "",
                    str(home),
                    f"no parameter of this {type(module).__name__} gets a gradient, so there is nothing to average",
                    "Unfreeze what you want to train, or do not replicate this module.",
                )
            )
        if reasons:
            raise ReplicationRefused(reasons)
        return home


def _refusal(name: str, tensor: Tensor, home: torch.device) -> Refusal | None:
    if is_lazy(tensor):
        return Refusal(
            name,
            "lazy",
            "its shape is not known, the inputs of the first forward pass never reached it",
            "Materialise it with devconv.materialize(module, *inputs), or name its module in ignored_modules.",
        )
    if tensor.device.type == "meta":
        return Refusal(
            name,
            "meta",
            "it has no values",
            "Use module.to_empty(device=...) and load a checkpoint before the first forward pass.",
        )
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        return Refusal(
            name,
            str(tensor.device),
            "it is a DTensor, so another API manages it already",
            "Replicate over a DeviceMesh with that API, or name its module in ignored_modules.",
        )
    if hasattr(tensor, "_in_backward_optimizers"):
        return Refusal(
            name,
            str(tensor.device),
            "its optimizer steps during the backward pass, before gradients are averaged",
            "Use an ordinary optimizer for it, or DistributedDataParallel, which knows such optimizers.",
        )
    if tensor.device.type != home.type:
        return Refusal(
            name,
            str(tensor.device),
            f"other tensors of the module are on {home.type}, so it has been moved half-way",
            f'Move the whole module with devconv.convert(module, "{home.type}"), or name its module in ignored_modules.',
        )
    return None


def warn_of_early_hooks(managed: Managed) -> None:
    """Say which parameters have hooks that see this rank's gradient before it is averaged."""
    early = [
        name
        for name, parameter in managed.parameters.items()
        if parameter.requires_grad and internals.accumulate_hooks(parameter)
    ]
    if early:
        more = f" and {len(early) - 3} more" if len(early) > 3 else ""
        warnings.warn(
            f"{', '.join(early[:3])}{more}: hooks from register_post_accumulate_grad_hook() run before gradients are "
            f"averaged. One that only looks is fine; one that steps an optimizer makes the ranks drift apart: step "
            f"after backward() instead.",
            RuntimeWarning,
            stacklevel=2,
        )


def manager_of(module: nn.Module) -> str | None:
    """Which other API looks after a module's parameters; None if none does."""
    cls = type(module)
    if internals.is_fully_sharded(cls):
        return "fully_shard"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and issubclass(cls, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    ddp = internals.data_parallel_class()
    if ddp is not None and issubclass(cls, ddp):
        return "DistributedDataParallel"
    return next((f"torch's {name}()" for name in internals.composable_apis(module) if name in _COMPOSABLE), None)


def collect(module: nn.Module, ignored: Iterable[nn.Module] = ()) -> Managed:
    """Find what `module`'s reducer has to look after.

    Args:
        module: the replicated module; what hangs on itself does not leave it out.
        ignored: sub-modules to leave out.
    """
    managed = Managed(skipped={id(child) for child in ignored})
    for child in module.modules():
        other = child is not module and (manager_of(child) is not None or _is_active(child))
        if other or id(child) in managed.skipped:
            managed.skipped.add(id(child))
            managed.elsewhere.update(id(tensor) for tensor in (*child.parameters(), *child.buffers()))
    seen: set[int] = set()
    for prefix, owner in managed.walk(module):
        dot = f"{prefix}." if prefix else ""
        for table, found in (
            (internals.parameters_of(owner), managed.parameters),
            (internals.buffers_of(owner), managed.buffers),
        ):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) in managed.elsewhere:
                    managed.shared.append(dot + key)
                elif id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[dot + key] = tensor
    return managed


def _is_active(module: nn.Module) -> bool:
    state = module.__dict__.get(MARK)
    return state is not None and state.active


def _walk(module: nn.Module, skipped: set[int]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    stack = [("", module)]
    while stack:
        prefix, current = stack.pop()
        if id(current) in seen or id(current) in skipped:
            continue
        seen.add(id(current))
        yield prefix, current
        dot = f"{prefix}." if prefix else ""
        children = internals.children_of(current).items()
        stack += [(dot + name, child) for name, child in reversed(children) if child is not None]


class Signature(NamedTuple):
    """The identity of every kept parameter: object, TensorImpl, where it is, and whether it is trained."""

    objects: list[int]
    impls: list[int]
    devices: list[torch.device]
    dtypes: list[torch.dtype]
    trained: list[bool]


_device, _dtype, _trained = attrgetter("device"), attrgetter("dtype"), attrgetter("requires_grad")


def signature_of(module: nn.Module, skipped: set[int]) -> Signature:
    """What changes when a parameter is replaced, swapped, moved, cast, frozen, added or taken away.

    Looked at before every forward pass, so it walks without names, and leaves the loops over tensors to C.
    """
    parameters_of, children_of = internals.parameters_of, internals.children_of
    found: list[Tensor] = []
    seen: set[int] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        current = stack.pop()
        key = id(current)
        if current is None or key in seen or key in skipped:
            continue
        seen.add(key)
        own = parameters_of(current)
        if own:
            found += [tensor for tensor in own.values() if tensor is not None]
        children = children_of(current)
        if children:
            stack += children.values()
    # Lists and no tuples: a container for each tensor would set Python's cyclic collector going.
    return Signature(
        list(map(id, found)),
        internals.impls_of(found),
        list(map(_device, found)),
        list(map(_dtype, found)),
        list(map(_trained, found)),
    )
