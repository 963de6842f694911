"""Copies that autograd follows: gradients of replicas are summed into the originals, moves are undone backwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress, repeat
from operator import not_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from .copying import add_up, broadcast, relocate

__all__ = ["attach", "spread", "travel"]


def attach(copies: Sequence[Sequence[Tensor]], sources: Sequence[Tensor]) -> list[list[Tensor]]:
    """Join copies to the graphs of the tensors that they were copied from.

    Args:
        copies: ``copies[d][t]``, fresh tensors without a graph.
        sources: ``T`` tensors on one device; those that require no gradient give copies that require none.

    Returns:
        The same copies, as outputs of one node: its backward sums the ``D`` gradients of each source, in the order of
        the replicas. A source that no replica used gets no gradient, as on one device.
    """
    if not sources or not copies:
        return [list(row) for row in copies]
    flat = _Spread.apply(_Wrapped(chain.from_iterable(copies)), [row[0].device for row in copies], *sources)  # type: ignore[no-untyped-call]
    count = len(sources)
    return [list(flat[start : start + count]) for start in range(0, len(flat), count)]


def spread(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Copies of ``T`` tensors on ``D`` devices, joined to their graphs where they have one and gradients are on.

    Args:
        tensors: any shapes and dtypes, on one device.
        devices: ``D`` indexed devices of any types.

    Returns:
        ``copies[d][t]``.
    """
    copies = broadcast(tensors, devices)
    tracked = [t for t, tensor in enumerate(tensors) if tensor.requires_grad] if torch.is_grad_enabled() else []
    joined = attach([[row[t] for t in tracked] for row in copies], [tensors[t] for t in tracked])
    for row, attached in zip(copies, joined, strict=True):
        for t, copy in zip(tracked, attached, strict=True):
            row[t] = copy
    return copies


class _Wrapped(tuple[Tensor, ...]):
    """Tensors that are no inputs of a node, though they are handed to it."""

    __slots__ = ()


class _Spread(Function):
    """One tensor each in, one copy on every device out."""

    @staticmethod
    def forward(ctx: Any, copies: _Wrapped, devices: list[torch.device], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.devices, ctx.home = devices, sources[0].device
        needed = ctx.needs_input_grad[2:]
        if not all(needed):
            ctx.mark_non_differentiable(
                *compress(copies, chain.from_iterable(repeat(list(map(not_, needed)), len(devices))))
            )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(grads) // len(ctx.devices)
        if torch.is_grad_enabled():
            sums = _Sum.apply(count, ctx.devices, ctx.home, *grads)  # type: ignore[no-untyped-call]
        else:
            sums = add_up([grads[start : start + count] for start in range(0, len(grads), count)], ctx.home)
        return (None, None, *sums)


class _Sum(Function):
    """The other way round, for gradients of gradients: one tensor from every device in, one sum out."""

    @staticmethod
    def forward(
        ctx: Any, count: int, devices: list[torch.device], home: torch.device, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.devices, ctx.given = devices, [grad is not None for grad in grads]
        return tuple(add_up([grads[start : start + count] for start in range(0, len(grads), count)], home))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [t for t, grad in enumerate(grads) if grad is not None]
        rows: list[list[Tensor | None]] = [[None] * len(grads) for _ in ctx.devices]
        for row, arrived in zip(rows, spread([grads[t] for t in present], ctx.devices), strict=True):  # type: ignore[misc]
            for t, copy in zip(present, arrived, strict=True):
                row[t] = copy
        given = zip(chain.from_iterable(rows), ctx.given, strict=True)
        return (None, None, None, *(grad if had else None for grad, had in given))


def travel(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Each tensor on its own device; gradients go back the same way, in batches too.

    Args:
        tensors: ``T`` tensors on any devices.
        devices: ``T`` indexed devices.

    Returns:
        ``T`` tensors; one that is there already is returned as it is.
    """
    moving = [i for i, (tensor, device) in enumerate(zip(tensors, devices, strict=True)) if tensor.device != device]
    if not moving:
        return list(tensors)
    batch, targets = [tensors[i] for i in moving], [devices[i] for i in moving]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in batch):
        tracked = [k for k, tensor in enumerate(batch) if tensor.requires_grad]
        arrived = relocate([tensor.detach() for tensor in batch], targets)
        joined = _Travel.apply(_Wrapped(arrived[k] for k in tracked), *(batch[k] for k in tracked))  # type: ignore[no-untyped-call]
        for k, tensor in zip(tracked, joined, strict=True):
            arrived[k] = tensor
    else:
        arrived = relocate(batch, targets)
    result = list(tensors)
    for i, tensor in zip(moving, arrived, strict=True):
        result[i] = tensor
    return result


class _Travel(Function):
    """Tensors in, the same tensors on other devices out."""

    @staticmethod
    def forward(ctx: FunctionCtx, arrived: _Wrapped, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.homes = [tensor.device for tensor in tensors]  # type: ignore[attr-defined]
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [(grad, home) for grad, home in zip(grads, ctx.homes, strict=True) if grad is not None]
        moved = iter(travel([grad for grad, _ in present], [home for _, home in present]))
        return (None, *(None if grad is None else next(moved) for grad in grads))
