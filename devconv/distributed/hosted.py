"""Gradients averaged through the host, for devices that no process group reduces.

At the end of each backward pass the gradients are fetched in one batch, averaged on the CPU in flat buckets, sent back
in one batch, and written into the gradients that are there. A pass over the host for every step: correct, and as fast
as the connection to the device.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from devconv import torch_internals as internals
from devconv.errors import Refusal, ReplicationRefused
from devconv.registry import backend_for
from devconv.staging import transmit

from .agreement import answered
from .collecting import Managed
from .groups import Group, size_of
from .reducing import Flight, Options

__all__ = ["HostReducer"]

_HOST = torch.device("cpu")
_BUCKET_MB = 25.0


class HostReducer:
    """Averages the gradients of one module over a process group of the host.

    Making it broadcasts parameters and buffers from rank 0. Parameters that a backward pass did not reach get the
    average of the ranks where it did (as with ``find_unused_parameters=True``); those reached nowhere are left alone.
    """

    def __init__(self, module: nn.Module, managed: Managed, group: Group, options: Options, flight: Flight) -> None:
        self._group, self._options, self._flight = group, options, flight
        self._rank, self._size = size_of(group)
        self._managed, self._module = managed, weakref.ref(module)
        self._trained = managed.trained
        self._names = [name for name, parameter in managed.parameters.items() if parameter.requires_grad]
        self._lock = threading.Lock()
        self._arrived: set[int] = set()
        self._local: set[int] = set()
        self._queued = False
        self._armed = False
        self._stale = True
        with answered("the broadcast of parameters and buffers from rank 0", self._rank, self._size):
            self._broadcast([*managed.parameters.values(), *managed.buffers.values()])
        hook = _weakly(self._arrive)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_numbered(hook, number))
            for number, parameter in enumerate(self._trained)
        ]

    def before(self) -> None:
        # A backward pass that failed leaves these as they were.
        self._arrived.clear()
        self._queued = False
        if self._stale and self._options.broadcast_buffers:
            module = self._module()
            assert module is not None
            # Looked up afresh: a forward pass may have put a new tensor in a buffer's place.
            with answered("preparing a forward pass", self._rank, self._size):
                self._broadcast(self._managed.buffers_now(module))
        # Evaluation changes no buffers, so a row of such passes needs one broadcast.
        self._stale = torch.is_grad_enabled()
        self._armed = self._armed or torch.is_grad_enabled()

    def after(self, output: Any) -> Any:
        if torch.is_grad_enabled():
            self._flight.start(output)
        return output

    def hold(self) -> None:
        # The backward pass of an earlier forward pass may still come, and is averaged.
        self._armed = self._flight.in_air

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._armed = False

    def _arrive(self, number: int) -> None:
        """A gradient is complete. Called in the thread of its device."""
        with self._lock:
            if not self._armed:
                self._local.add(number)
                return
            self._arrived.add(number)
            if self._queued:
                return
            self._queued = True
        internals.call_after_backward(self._reduce)

    def _reduce(self) -> None:
        with self._lock:
            # What has added up under no_sync is averaged with the rest, also where this backward pass does not reach.
            local = {number for number in self._local if self._trained[number].grad is not None}
            arrived = self._arrived | local
            self._arrived, self._local, self._queued = set(), set(), False
        self._flight.land()
        with answered("averaging gradients", self._rank, self._size), torch.no_grad():
            self._average(self._used_anywhere(arrived), arrived)

    def _used_anywhere(self, arrived: set[int]) -> list[int]:
        """Numbers of the parameters that got a gradient on any rank, the same list on every rank."""
        used = torch.zeros(len(self._trained), dtype=torch.uint8)
        used[list(arrived)] = 1
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in used.nonzero()]

    def _average(self, numbers: Sequence[int], arrived: set[int]) -> None:
        # What the ranks must reduce alike is decided by the parameters, which are alike, not by their gradients.
        present = [number for number in numbers if number in arrived or self._trained[number].grad is not None]
        self._refuse_sparse(present)
        gradients: list[Tensor] = []
        for number in present:
            gradient = self._trained[number].grad
            assert gradient is not None
            gradients.append(gradient)
        host = dict(zip(present, _fetch(gradients), strict=True))
        for number in numbers:
            if number not in host:
                host[number] = torch.zeros(self._trained[number].shape, dtype=self._trained[number].dtype)
        buckets = self._batches([host[number] for number in numbers])
        _flat(buckets, lambda flat: dist.all_reduce(flat.div_(self._size), group=self._group, async_op=True))
        self._write(numbers, host)

    def _write(self, numbers: Sequence[int], host: dict[int, Tensor]) -> None:
        """Send the averages to where their parameters are, into the gradients that are there already."""
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for number in numbers:
            by_device[self._trained[number].device].append(number)
        for device, there in by_device.items():
            for number, sent in zip(there, _send([host[number] for number in there], device), strict=True):
                parameter = self._trained[number]
                if parameter.grad is None:
                    parameter.grad = sent
                else:
                    parameter.grad.copy_(sent)

    def _refuse_sparse(self, numbers: Iterable[int]) -> None:
        reasons = []
        for number in numbers:
            parameter = self._trained[number]
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                reasons.append(
                    Refusal(
                        self._names[number],
                        str(parameter.device),
                        f"its gradient is {parameter.grad.layout}, which cannot be averaged through the host",
                        "Use sparse=False.",
                    )
                )
        if reasons:
            raise ReplicationRefused(reasons)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank rank 0's values, through the host."""
        if not tensors:
            return
        with torch.no_grad():
            values = [tensor.detach() for tensor in tensors]
            # Only rank 0's values are wanted, so only there is the device waited for.
            host = _fetch(values) if self._rank == 0 else [torch.empty(v.shape, dtype=v.dtype) for v in values]
            source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
            _flat(
                self._batches(host),
                # As bytes, so that every dtype can be sent.
                lambda flat: dist.broadcast(flat.view(torch.uint8), source, group=self._group, async_op=True),
            )
            if self._rank == 0:
                return
            by_device: dict[torch.device, list[int]] = defaultdict(list)
            for position, value in enumerate(values):
                by_device[value.device].append(position)
            for device, there in by_device.items():
                for position, sent in zip(there, _send([host[position] for position in there], device), strict=True):
                    values[position].copy_(sent)

    def _batches(self, tensors: Iterable[Tensor]) -> list[list[Tensor]]:
        """Tensors of one dtype together, up to the bucket's size."""
        cap = (self._options.bucket_cap_mb or _BUCKET_MB) * 2**20
        batches: list[list[Tensor]] = []
        open_: dict[torch.dtype, tuple[list[Tensor], int]] = {}
        for tensor in tensors:
            batch, size = open_.get(tensor.dtype, ([], 0))
            if not batch or size >= cap:
                batch, size = [], 0
                batches.append(batch)
            batch.append(tensor)
            open_[tensor.dtype] = batch, size + tensor.numel() * tensor.element_size()
        return batches


def _flat(batches: Sequence[Sequence[Tensor]], start: Callable[[Tensor], Any]) -> None:
    """Run a collective on every batch as one flat tensor, all of them at once, and write the results back."""
    flats = [torch.cat([tensor.reshape(-1) for tensor in batch]) for batch in batches]
    for work in [start(flat) for flat in flats if flat.numel()]:
        work.wait()
    for batch, flat in zip(batches, flats, strict=True):
        for tensor, part in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host, in one batch for each device; all that is queued there is run first, in one go."""
    host: list[Tensor] = [*tensors]
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        by_device[tensor.device].append(position)
    for device, there in by_device.items():
        # A device that only records operations would run the gradients alone now, and parts of the step once more later.
        backend_for(device.type).synchronize(device)
        for position, copy in zip(there, transmit([tensors[p] for p in there], device, _HOST, None), strict=True):
            host[position] = copy
    return host


def _send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return transmit(tensors, _HOST, device, None)


def _weakly(method: Callable[[int], None]) -> Callable[[int], None]:
    """A bound method that keeps nothing alive: hooks live as long as the parameters."""
    reference = weakref.WeakMethod(method)

    def call(number: int) -> None:
        alive = reference()
        if alive is not None:
            alive(number)

    return call


def _numbered(hook: Callable[[int], None], number: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        hook(number)

    return arrived
