"""Replicas of a module on several devices: made once, and given fresh tensors on every call."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from devconv import registry
from devconv.errors import NotAModuleError

from .collector import paused_collector
from .copying import broadcast
from .freshness import Freshness
from .graph import attach
from .pool import Pool
from .refusing import refuse_dtypes, refuse_source, refuse_values
from .structure import Structure

__all__ = ["Replicator", "replicate"]

T = TypeVar("T", bound=nn.Module)

Device = str | torch.device | int


def replicate(module: T, devices: Iterable[Device], *, detach: bool = False) -> list[T]:
    """Replicas of a module, one on each device, in one process.

    What each call costs depends on the module's size. For many calls keep a `Replicator`, or use `DataParallel`.

    Args:
        module: any module whose parameters and buffers are on one device. It is not changed.
        devices: ``D`` devices of any types that have a backend; one may be named twice.
        detach: the replicas' parameters require no gradient.

    Returns:
        ``D`` modules of the same class. Their tensors are copies on their device, and gradients that reach them are
        summed into the originals' ``.grad``. The first replica on the module's own device holds the original tensors
        themselves, so that what it writes in place (BatchNorm's statistics) stays. ``parameters()`` of a replica
        yields its tensors. Hooks, plain attributes and everything that is no tensor are shared with the original.

    Raises:
        NotAModuleError: `module` is no ``nn.Module``.
        UninitializedTensorError: a parameter is still lazy.
        ReplicationRefused: parameters are on several devices, or a device cannot hold one, or a part of the module is
            compiled or scripted.
        InvalidDeviceError: one of `devices` does not exist.

    Source: torch.nn.parallel.replicate (torch 2.13), for devices of any type.

    >>> layer = nn.Linear(2, 1)
    >>> first, second = replicate(layer, ["cpu", "cpu"])
    >>> (first(torch.ones(3, 2)).sum() + second(torch.ones(2, 2)).sum()).backward()
    >>> layer.bias.grad
    tensor([5.])
    """
    return Replicator(module, devices, detach=detach)()


class Replicator(Generic[T]):
    """Makes replicas of one module again and again, and pays for their Python side once.

    The caller owns it, and with it every cache: nothing is stored on the module, and dropping the `Replicator` drops
    everything. It keeps the module alive.

    Every call sends the values of all parameters and buffers, and notices ``train()`` and ``eval()``, hooks, plain
    attributes, added, removed and replaced modules and tensors, ties, dtypes and moves to another device. It does not
    look into objects that are neither modules, tensors, lists, tuples, dicts, bound methods nor partials: replicas
    share those with the module.

    Replicas that the caller still holds (in a variable, in the graph of a checkpoint, in a hook) are left alone by
    later calls. Those that nobody holds any more are used again: their tensors go, and so does what a forward pass
    wrote on them.

    >>> layer = nn.Linear(2, 1)
    >>> make = Replicator(layer, ["cpu", "cpu"])
    >>> [type(replica).__name__ for replica in make()]
    ['Linear', 'Linear']
    """

    def __init__(
        self, module: T, devices: Iterable[Device], *, detach: bool = False, send: Literal["all", "changed"] = "all"
    ) -> None:
        """Prepare replicas; the first call makes them.

        Args:
            module: the module to replicate.
            devices: ``D`` devices of any types that have a backend; one may be named twice.
            detach: the replicas' parameters require no gradient.
            send: ``"all"`` sends every value on every call. ``"changed"`` leaves out parameters that provably have
                the values that were sent last, for inference and for gradients accumulated over several batches; it
                keeps a copy of the parameters on every device. It sees every in-place operation that autograd counts
                and every step of a ``torch.optim`` optimizer. It does not see writes through ``.data``,
                ``.detach()``, numpy or DLPack, nor those of an optimizer that is not one of torch's: call
                `mark_dirty` after them. Buffers are sent on every call, because BatchNorm's kernels write uncounted.

        Raises:
            NotAModuleError: `module` is no ``nn.Module``.
            InvalidDeviceError: one of `devices` does not exist.
            ValueError: `send` is something else.
        """
        if not isinstance(module, nn.Module):
            raise NotAModuleError(module)
        if send not in ("all", "changed"):
            raise ValueError(f'send={send!r} is neither "all" nor "changed"')
        self._module = module
        self._devices = tuple(registry.resolve(device)[0] for device in devices)
        self._detach = detach
        self._freshness = Freshness() if send == "changed" else None
        self._structure: Structure | None = None
        self._pool: Pool | None = None
        self._lock = threading.RLock()

    @property
    def module(self) -> T:
        """The module that is replicated."""
        return self._module

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the replicas are, indexed."""
        return self._devices

    def __call__(
        self, count: int | None = None, *, detach: bool | None = None, home: torch.device | None = None
    ) -> list[T]:
        """Replicas with the module's values of this moment.

        Args:
            count: replicas on the first `count` devices only; None for all.
            detach: overrides what the `Replicator` was made with, for this call.
            home: the device that the module has to be on; None for any.

        Returns:
            One replica for each device, as `replicate` describes them.

        Raises:
            UninitializedTensorError: a parameter is still lazy.
            ReplicationRefused: parameters are on several devices, or a device cannot hold one, or a part of the
                module is compiled or scripted.
        """
        devices = self._devices[:count]
        with self._lock:
            structure, pool = self._current()
            source, tracks_buffers = structure.state()
            refuse_source(structure.named(), source, home)
            known = structure.parameter_count if tracks_buffers else len(structure.tensors)
            rows = self._rows(structure, source, devices, known, self._detach if detach is None else detach)
            pool.settle()
            replicas: list[T] = []
            for row, plain in rows:
                skeleton = pool.take()
                skeleton.bind(row, plain)
                replicas.append(skeleton.root)  # type: ignore[arg-type]
                pool.lend(skeleton)
            return replicas

    def check(self, home: torch.device | None = None) -> None:
        """Whether the module can be replicated as it is; nothing is sent.

        Args:
            home: the device that it has to be on; None for any.

        Raises:
            UninitializedTensorError: a parameter is still lazy.
            ReplicationRefused: parameters are on several devices, or not on `home`, or a part of the module is
                compiled or scripted.
        """
        with self._lock:
            structure, _ = self._current()
            refuse_source(structure.named(), structure.state()[0], home)

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Say that parameters were written in a way that ``send="changed"`` cannot see.

        Args:
            tensors: those parameters; none for all of them.
        """
        if self._freshness is not None:
            with self._lock:
                self._freshness.mark(tensors)

    def release(self) -> None:
        """Let go of the tensors of every replica that nobody holds any more, now instead of at the next call."""
        with self._lock:
            if self._pool is not None:
                self._pool.settle()

    def _current(self) -> tuple[Structure, Pool]:
        if self._structure is not None and self._pool is not None:
            stale = self._structure.stale()
            if stale is not None:
                if stale:
                    self._pool.outdate(stale)
                return self._structure, self._pool
        self._structure = self._pool = None
        with paused_collector():
            self._structure = Structure(self._module)
        # Twice: a caller that keeps the replicas of one call until the next has two sets of them for a moment.
        self._pool = Pool(self._structure, kept=2 * len(self._devices))
        return self._structure, self._pool

    def _rows(
        self, structure: Structure, home: torch.device | None, devices: Sequence[torch.device], known: int, detach: bool
    ) -> list[tuple[Sequence[Tensor], Mapping[int, Tensor]]]:
        """For each replica, the tensors in its places, and what it has for a tensor of a plain attribute.

        Of the tensors up to number `known` only parameters require gradients.
        """
        extras = structure.extras(home)
        originals = structure.tensors + extras if extras else structure.tensors
        # The first replica at home holds the originals themselves.
        alias = devices.index(home) if home in devices else None
        places = [place for place in range(len(devices)) if place != alias]
        targets = {devices[place].type: devices[place] for place in places}
        refuse_values(structure.named(), home, targets)
        refuse_dtypes(structure.tensors, structure.named(), targets)
        # Parameters are leaves and come first; the node finds out which of them require a gradient. For the others one
        # has to look, and those that were computed are sent without their past.
        count = structure.parameter_count
        tracked = [position for position in range(known, len(originals)) if originals[position].requires_grad]
        leaves: Sequence[int] = range(count)
        computed = [position for position in tracked if not originals[position].is_leaf]
        values = originals
        if tracked:
            leaves = [*range(count), *(position for position in tracked if position not in computed)]
            values = list(originals)
            for position in computed:
                values[position] = originals[position].detach()
        copies = self._copies(structure, values, places, devices)
        if not detach and torch.is_grad_enabled():
            _join(originals, list(copies.values()), leaves)
            # A computed tensor gets a node of its own: a backward that does not come from it must not enter its past,
            # which may be spent.
            for position in computed:
                _join(originals, list(copies.values()), [position])
        rows: list[tuple[Sequence[Tensor], Mapping[int, Tensor]]] = []
        for place in range(len(devices)):
            row = copies[place] if place != alias else originals
            if place == alias and detach:
                row = list(originals)
                for position in (*range(count), *tracked):
                    row[position] = originals[position].detach()
            plain = dict(zip(map(id, originals), row, strict=True)) if structure.plain else {}
            rows.append(([row[position] for position in structure.index] if structure.tied else row, plain))
        return rows

    def _copies(
        self, structure: Structure, values: list[Tensor], places: list[int], devices: Sequence[torch.device]
    ) -> dict[int, list[Tensor]]:
        """Fresh tensors for the replicas that are copies, by their place."""
        targets = [devices[place] for place in places]
        if self._freshness is None:
            return dict(zip(places, broadcast(values, targets), strict=True))
        known = structure.parameter_count
        stamps = self._freshness.begin(structure.tensors, known)
        needed: set[int] = set().union(
            *(self._freshness.outdated(place, device, stamps) for place, device in zip(places, targets, strict=True))
        )
        sent = [position for position in range(len(values)) if position >= known or position in needed]
        copies: dict[int, list[Tensor]] = {}
        for place, row in zip(places, broadcast([values[position] for position in sent], targets), strict=True):
            arrived = dict(zip(sent, row, strict=True))
            fresh = {position: copy for position, copy in arrived.items() if position < known}
            self._freshness.keep(place, fresh, stamps)
            copies[place] = [
                arrived[position] if position in arrived else self._freshness.kept(place, position)
                for position in range(len(values))
            ]
        return copies


def _join(originals: list[Tensor], rows: list[list[Tensor]], positions: Sequence[int]) -> None:
    """Put the copies of some tensors into the graphs of their originals, in place."""
    if not rows or not positions:
        return
    # Parameters come first, so most often it is one stretch, and slices are much faster than thousands of steps.
    first, last = positions[0], positions[-1] + 1
    if last - first == len(positions):
        joined = attach([row[first:last] for row in rows], originals[first:last])
        for row, attached in zip(rows, joined, strict=True):
            row[first:last] = attached
        return
    joined = attach([[row[position] for position in positions] for row in rows], [originals[p] for p in positions])
    for row, attached in zip(rows, joined, strict=True):
        for position, copy in zip(positions, attached, strict=True):
            row[position] = copy
