"""Which parameters provably have the values that were sent before: the opt-in of ``send="changed"``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from devconv import torch_internals as internals

__all__ = ["Freshness"]


class _Sent(NamedTuple):
    """One parameter's copy on one device, and the signs under which it is still good."""

    copy: Tensor
    writes: int
    """Writes to the copy; a forward pass may write on its replica's parameters."""
    stamp: tuple[object, ...]


class Freshness:
    """Remembers, for each place in a list of devices, the copies of parameters and when they were made."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._sent: dict[int, list[_Sent | None]] = {}
        self._epoch = 0
        self._marks: dict[int, int] = {}
        reference = weakref.ref(self)

        def after_step(*_: Any) -> None:
            # Fused kernels write without counting, so a step of any optimizer makes everything doubtful.
            freshness = reference()
            if freshness is not None:
                freshness.mark()

        hook = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, hook.remove)

    def mark(self, tensors: Sequence[Tensor] = ()) -> None:
        """The values of `tensors`, of all without an argument, may have changed."""
        if not tensors:
            self._epoch += 1
        for tensor in tensors:
            self._marks[id(tensor)] = self._marks.get(id(tensor), 0) + 1

    def begin(self, tensors: list[Tensor], parameters: int) -> list[tuple[object, ...]]:
        """The signs of the first `parameters` of `tensors` now. Everything is forgotten when the tensors are others."""
        if self._tensors is not tensors:
            # The structure makes a new list when any tensor of the module is another object.
            self._tensors = tensors
            self._sent.clear()
            self._marks.clear()
        known = tensors[:parameters]
        return [
            (self._epoch, self._marks.get(id(tensor), 0), writes, tensor.data_ptr(), tensor.dtype, tensor.device)
            for tensor, writes in zip(known, internals.writes_of(known), strict=True)
        ]

    def outdated(self, place: int, device: torch.device, stamps: list[tuple[object, ...]]) -> set[int]:
        """Positions of the parameters that the device at `place` needs again."""
        sent = self._sent.get(place, [None] * len(stamps))
        copies = [entry.copy for entry in sent if entry is not None]
        writes = iter(internals.writes_of(copies))
        needed = set()
        for position, (entry, stamp) in enumerate(zip(sent, stamps, strict=True)):
            if entry is None or next(writes) != entry.writes or entry.stamp != stamp or entry.copy.device != device:
                needed.add(position)
        return needed

    def keep(self, place: int, copies: dict[int, Tensor], stamps: list[tuple[object, ...]]) -> None:
        """Remember fresh copies of parameters, by their positions."""
        sent = self._sent.setdefault(place, [None] * len(stamps))
        positions = list(copies)
        for position, writes in zip(positions, internals.writes_of(list(copies.values())), strict=True):
            # Detached: the copy itself is about to become part of a graph, which must not outlive its backward.
            sent[position] = _Sent(copies[position].detach(), writes, stamps[position])

    def kept(self, place: int, position: int) -> Tensor:
        """A remembered copy, as a new tensor on the same memory."""
        entry = self._sent[place][position]
        assert entry is not None
        return entry.copy.detach()

    def forget(self) -> None:
        """Drop every copy."""
        self._sent.clear()
