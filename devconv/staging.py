"""Every new tensor, made off to the side. The model is not touched, so a failure here costs nothing.

Plain tensors cross in batches, one call of the backend for each pair of devices; tensors on one storage cross as one
and are taken apart again on the other side; whatever has its own idea of a conversion is asked, one tensor at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter

import torch
from torch import Tensor

from . import registry
from . import torch_internals as internals
from .crowd import Crowd
from .entries import Cohorts, Entry, Kind
from .errors import BackendProtocolError, ConversionRefused, Refusal
from .geometry import Geometry, geometry_of, recall, record, scatter, span_of
from .policy import Route
from .transfer import Transfer

__all__ = ["ask", "stage", "transmit"]


@dataclass
class _Batch:
    """Tensors that cross between one pair of devices in one call: of crowds, of entries, then of whole groups."""

    crowds: list[Crowd] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    """Of the entries."""
    flats: list[tuple[_Flat, Tensor, torch.dtype]] = field(default_factory=list)


@dataclass
class _Flat:
    """The stretch of storage that a group covers, and where its members lie in it."""

    group: list[Entry]
    places: list[Geometry]
    first: int
    length: int

    def rebuild(self, flat: Tensor, *, remember: bool) -> None:
        tensors = []
        for entry, place in zip(self.group, self.places, strict=True):
            staged = flat.as_strided(place.size, place.stride, place.offset - self.first)
            if not entry.parameter and type(entry.tensor) is not Tensor:
                staged = staged.as_subclass(type(entry.tensor))
            entry.staged = staged
            tensors.append(staged)
        if remember:
            record(tensors, [place._replace(offset=place.offset - self.first) for place in self.places])


def stage(cohorts: Cohorts, transfer: Transfer, fn: Callable[[Tensor], Tensor], crowds: Sequence[Crowd] = ()) -> None:
    """Make the new tensor of every entry that changes, as ``entry.staged``.

    Args:
        cohorts: the entries that change, by what was decided.
        transfer: the conversion, its device resolved.
        fn: the function that ``_apply`` got, for tensors that are asked one at a time.
        crowds: the tensors that change alike, by what was decided.

    Raises:
        ConversionRefused: a device left a tensor where it was.
        BackendProtocolError: a backend returned the wrong number of tensors, or one of another dtype.
    """
    batches: dict[tuple[torch.device, torch.device], _Batch] = defaultdict(_Batch)
    groups: dict[int, list[Entry]] = {}
    refusals: list[Refusal] = []
    plain = Kind.PLAIN
    simple = not transfer.empty and transfer.memory_format is None and not internals.fake_mode_is_active()
    with torch.no_grad():
        for (route, device, _, target, to_dtype), cohort in cohorts.items():
            if route is Route.RETARGET:
                for entry in cohort:
                    entry.staged = torch.empty(0, device=target, dtype=to_dtype)
                continue
            batch = batches[device, target]
            for entry in cohort:
                if entry.group is not None and _is_whole(entry.group):
                    groups[id(entry.group)] = entry.group
                elif simple and entry.kind is plain:
                    batch.entries.append(entry)
                    batch.dtypes.append(to_dtype)
                elif entry.staged is None:
                    try:
                        entry.staged = _ask_for(entry, fn)
                        _check_arrival(entry, entry.staged)
                    except ConversionRefused as refused:
                        refusals += refused.reasons
        if refusals:
            raise ConversionRefused(refusals)
        for group in groups.values():
            _stage_group(group, transfer, batches)
        for crowd in crowds:
            batches[crowd.decision.device, crowd.decision.target].crowds.append(crowd)
        for (device, target), batch in batches.items():
            if batch.crowds or batch.entries or batch.flats:
                _stage_batch(batch, device, target, transfer.non_blocking)


def _is_whole(group: list[Entry]) -> bool:
    """Whether a storage can move as one: every member goes the same way, with the same dtype."""
    first = group[0].decision
    return first.route is not Route.KEEP and all(
        entry.decision[1:] == first[1:] and not entry.tensor.is_neg() and not entry.tensor.is_conj() for entry in group
    )


def ask(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The function's own answer for one tensor."""
    # A buffer or gradient that is the result of a computation keeps its graph, as in stock torch.
    with torch.set_grad_enabled(tensor.requires_grad and not tensor.is_leaf):
        return fn(tensor)


def _ask_for(entry: Entry, fn: Callable[[Tensor], Tensor]) -> Tensor:
    try:
        return ask(entry.tensor, fn)
    except (NotImplementedError, RuntimeError) as error:
        if entry.tensor.layout is torch.strided and not entry.tensor.is_quantized:
            raise
        what = entry.decision.dtype if entry.tensor.is_quantized else entry.tensor.layout
        refusal = Refusal(
            entry.name,
            str(entry.decision.device),
            f"{entry.decision.target} cannot hold a tensor of {what}: {str(error).splitlines()[0]}",
            "Make it dense first, with .to_dense() or .dequantize().",
        )
        raise ConversionRefused([refusal]) from error


def _check_arrival(entry: Entry, staged: Tensor) -> None:
    target, dtype = entry.decision.target, entry.decision.to_dtype
    if internals.is_fake(staged) and not internals.is_fake(entry.tensor):
        raise ConversionRefused(
            [
                Refusal(
                    entry.name,
                    str(entry.decision.device),
                    "FakeTensorMode is active, and would leave a fake in place of a real tensor",
                    "Convert the model outside of FakeTensorMode, or build it inside.",
                )
            ]
        )
    if staged.device == target and entry.kind is Kind.PLAIN and staged.dtype is not dtype:
        raise BackendProtocolError(target.type, "send", f"{entry.name} is {staged.dtype}, and {dtype} was asked for")
    if staged.device != target:
        raise ConversionRefused(
            [
                Refusal(
                    entry.name,
                    str(entry.decision.device),
                    f"{target} silently leaves a {entry.decision.dtype} tensor on {staged.device}",
                    "Convert it to a dtype that the device holds (a quantised one with .dequantize()) first.",
                )
            ]
        )


def _stage_group(
    group: list[Entry], transfer: Transfer, batches: dict[tuple[torch.device, torch.device], _Batch]
) -> None:
    _, device, dtype, target, to_dtype = group[0].decision
    tensors = [entry.tensor.detach() for entry in group]
    reliable = registry.backend_for(device.type).capabilities.strides
    places = [geometry_of(tensor) for tensor in tensors] if reliable else recall([entry.tensor for entry in group])
    if places is None:
        raise ConversionRefused(
            [
                Refusal(
                    entry.name,
                    str(device),
                    f"it shares a storage, and {device.type} cannot tell which part of it",
                    "Make it a tensor of its own with .clone(), or tie the tensors before moving them to the device.",
                )
                for entry in group
            ]
        )
    first, length = span_of(places)
    flat = _Flat(group, places, first, length)
    if transfer.empty or not registry.backend_for(target.type).capabilities.values:
        empty = torch.empty(length, device=target, dtype=to_dtype)
        flat.rebuild(empty, remember=not registry.backend_for(target.type).capabilities.strides)
    elif reliable:
        batches[device, target].flats.append((flat, tensors[0].as_strided((length,), (1,), first), to_dtype))
    else:
        host = torch.zeros(length, dtype=dtype)
        for values, place in zip(transmit(tensors, device, torch.device("cpu"), None), places, strict=True):
            scatter(host, values, place, first)
        batches[torch.device("cpu"), target].flats.append((flat, host, to_dtype))


def _stage_batch(batch: _Batch, device: torch.device, target: torch.device, non_blocking: bool) -> None:
    tensors = list(chain.from_iterable(crowd.tensors for crowd in batch.crowds))
    dtypes = list(chain.from_iterable(repeat(crowd.decision.to_dtype, len(crowd)) for crowd in batch.crowds))
    tensors += [entry.tensor for entry in batch.entries] + [tensor for _, tensor, _ in batch.flats]
    dtypes += batch.dtypes + [dtype for _, _, dtype in batch.flats]
    arrived = transmit(tensors, device, target, dtypes, non_blocking=non_blocking)
    first = 0
    for crowd in batch.crowds:
        crowd.staged = arrived[first : first + len(crowd)]
        first += len(crowd)
        _check_crowd(crowd)
    for entry, tensor, dtype in zip(batch.entries, arrived[first:], batch.dtypes, strict=False):
        entry.staged = tensor
        if tensor.dtype is not dtype or tensor.device != target:
            _check_arrival(entry, tensor)
    remember = not registry.backend_for(target.type).capabilities.strides
    for (flat, _, _), tensor in zip(batch.flats, arrived[first + len(batch.entries) :], strict=True):
        if tensor.device != target:
            _check_arrival(flat.group[0], tensor)
        flat.rebuild(tensor, remember=remember)


def _check_crowd(crowd: Crowd) -> None:
    _, _, _, target, dtype = crowd.decision
    if set(map(attrgetter("dtype"), crowd.staged)) <= {dtype} and set(map(attrgetter("device"), crowd.staged)) <= {
        target
    }:
        return
    for entry, tensor in zip(crowd.entries(), crowd.staged, strict=True):
        entry.decision = crowd.decision
        _check_arrival(entry, tensor)


def transmit(
    tensors: Sequence[Tensor],
    device: torch.device,
    target: torch.device,
    dtypes: Sequence[torch.dtype] | None,
    *,
    non_blocking: bool = False,
) -> list[Tensor]:
    """Copies of ``T`` plain tensors that are on `device`, on `target`: the composition of the two backends.

    Args:
        tensors: ``T`` strided tensors on `device`, of any shapes and dtypes.
        device: where they are, indexed.
        target: where they go, indexed.
        dtypes: ``T`` dtypes of the results; None keeps each tensor's own.
        non_blocking: the copies need not be complete on return.

    Returns:
        ``T`` new tensors on `target`, in the same order.

    Raises:
        BackendProtocolError: a backend returned another number of tensors.
    """
    there = registry.backend_for(target.type)
    here = registry.backend_for(device.type)
    if device.type == target.type:
        arrived = there.copy(tensors, target, dtypes=dtypes, non_blocking=non_blocking)
    elif device.type == "cpu" or not there.capabilities.values:
        arrived = there.send(tensors, target, dtypes=dtypes, non_blocking=non_blocking)
    elif target.type == "cpu":
        arrived = here.fetch(tensors, dtypes=dtypes, non_blocking=non_blocking)
    else:
        # Through the host, waiting for the first leg: the second reads what it wrote.
        arrived = there.send(here.fetch(tensors), target, dtypes=dtypes, non_blocking=non_blocking)
    if len(arrived) != len(tensors):
        raise BackendProtocolError(
            there.device_type, "send", f"it returned {len(arrived)} tensors for the {len(tensors)} it was given"
        )
    return arrived
