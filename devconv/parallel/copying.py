"""Tensors to several devices, sums back from them, and moves between any two, in one batch per kind of device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from devconv import registry
from devconv import torch_internals as internals
from devconv.errors import BackendProtocolError
from devconv.staging import transmit

__all__ = ["add_up", "broadcast", "relocate"]

_CPU = torch.device("cpu")
_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


_class_of, _layout_of, _dtype_of, _device_of = type, attrgetter("layout"), attrgetter("dtype"), attrgetter("device")
_is_leaf, _is_negative = attrgetter("is_leaf"), torch.Tensor.is_neg


def _is_plain(tensor: Tensor) -> bool:
    """Whether a backend's batched calls can copy it: not sparse, quantised, wrapped, conjugated, negated or computed."""
    return (
        tensor.layout is torch.strided
        and not internals.is_wrapper(type(tensor))
        and not tensor.is_quantized
        and not (tensor.dtype.is_complex and tensor.is_conj())
        and not tensor.is_neg()
        and (tensor.is_leaf or not tensor.requires_grad)
    )


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor `_is_plain`, without a call for each: there are thousands."""
    return (
        set(map(_layout_of, tensors)) == {torch.strided}
        and not any(map(internals.is_wrapper, set(map(_class_of, tensors))))
        and not any(dtype.is_complex or dtype in _QUANTISED for dtype in set(map(_dtype_of, tensors)))
        and all(map(_is_leaf, tensors))
        and not any(map(_is_negative, tensors))
    ) or all(map(_is_plain, tensors))


def _checked(copies: list[Tensor], device: torch.device) -> list[Tensor]:
    # A tensor that a device silently left behind would meet others in one operation, which ends the process on XLA.
    if copies and set(map(_device_of, copies)) != {device}:
        left = next(copy for copy in copies if copy.device != device)
        raise BackendProtocolError(
            device.type, "broadcast", f"a tensor of {left.dtype} arrived on {left.device} instead of {device}"
        )
    return copies


def broadcast(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Copies of ``T`` tensors on ``D`` devices, without a graph.

    Args:
        tensors: any shapes and dtypes, on one device.
        devices: ``D`` indexed devices of any types; one may be named twice.

    Returns:
        ``copies[d][t]``, never an alias of ``tensors[t]``: ``D`` times the bytes.

    Raises:
        BackendProtocolError: a backend returned too few tensors, or left one where it was.
    """
    if not tensors:
        return [[] for _ in devices]
    if _are_plain(tensors):
        return _broadcast(tensors, devices)
    # Sparse and quantised tensors, and those that keep their data in inner tensors, have their own idea of a copy.
    with torch.no_grad():
        own = {i: tensor.detach() for i, tensor in enumerate(tensors) if not _is_plain(tensor)}
        rest = iter(_broadcast([tensor for i, tensor in enumerate(tensors) if i not in own], devices))
        rows = []
        for device in devices:
            plain = iter(next(rest))
            row = [own[i].to(device, copy=True) if i in own else next(plain) for i in range(len(tensors))]
            rows.append(_checked(row, device))
    return rows


def _broadcast(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    if not tensors:
        return [[] for _ in devices]
    source = tensors[0].device
    by_type: dict[str, list[int]] = defaultdict(list)
    for position, device in enumerate(devices):
        by_type[device.type].append(position)
    rows: list[list[Tensor]] = [[] for _ in devices]
    host: Sequence[Tensor] | None = tensors if source.type == "cpu" else None
    for device_type, positions in by_type.items():
        backend = registry.backend_for(device_type)
        if device_type == source.type or not backend.capabilities.values:
            start = tensors
        else:
            if host is None:
                host = registry.backend_for(source.type).fetch(tensors)
            start = host
        for position, row in zip(
            positions, backend.broadcast(start, [devices[position] for position in positions]), strict=True
        ):
            if len(row) != len(tensors):
                raise BackendProtocolError(
                    device_type, "broadcast", f"it returned {len(row)} tensors for the {len(tensors)} it was given"
                )
            rows[position] = _checked(row, devices[position])
    return rows


def add_up(parts: Sequence[Sequence[Tensor | None]], device: torch.device) -> list[Tensor | None]:
    """Sums of what several devices hold.

    Args:
        parts: ``parts[d][t]``, a term of sum ``t`` on any device, None for no term.
        device: where the sums are wanted.

    Returns:
        ``T`` sums on `device`; None where no part has a term.
    """
    here: dict[int, list[Tensor]] = defaultdict(list)
    elsewhere: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    own_ways: set[int] = set()
    for part in parts:
        special = not _are_plain([term for term in part if term is not None])
        for t, term in enumerate(part):
            if term is None:
                continue
            if special and not _is_plain(term):
                own_ways.add(t)
                here[t].append(term.to(device))
            elif term.device.type == device.type:
                here[t].append(term)
            else:
                elsewhere[term.device.type][t].append(term)
    if elsewhere:
        for t, total in _add_on_host(elsewhere, device).items():
            here[t].append(total)
    own = registry.backend_for(device.type)
    sums: list[Tensor | None] = [None] * (len(parts[0]) if parts else 0)
    plain = [t for t in here if t not in own_ways]
    for t, total in zip(plain, own.accumulate([here[t] for t in plain], device), strict=True):
        sums[t] = total
    with torch.no_grad():
        for t in own_ways:
            total = here[t][0]
            for term in here[t][1:]:
                total = total + term
            sums[t] = total
    return sums


def _add_on_host(elsewhere: dict[str, dict[int, list[Tensor]]], device: torch.device) -> dict[int, Tensor]:
    on_host: dict[int, list[Tensor]] = defaultdict(list)
    for device_type, terms in elsewhere.items():
        flat = [term for group in terms.values() for term in group]
        fetched = iter(flat if device_type == "cpu" else registry.backend_for(device_type).fetch(flat))
        for t, group in terms.items():
            on_host[t].extend(next(fetched) for _ in group)
    sums = registry.backend_for("cpu").accumulate(list(on_host.values()), _CPU)
    if device != _CPU:
        sums = transmit(sums, _CPU, device, None)
    return dict(zip(on_host, sums, strict=True))


def relocate(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Each tensor on its own device, without a graph.

    Args:
        tensors: ``T`` tensors on any devices.
        devices: ``T`` indexed devices.

    Returns:
        ``T`` tensors; one that is there already is returned as it is.

    Raises:
        BackendProtocolError: a backend left a tensor where it was.
    """
    moved = list(tensors)
    batches: dict[tuple[str, torch.device], list[int]] = defaultdict(list)
    for position, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.device == device:
            continue
        if _is_plain(tensor):
            batches[tensor.device.type, device].append(position)
        else:
            with torch.no_grad():
                moved[position] = _checked([tensor.detach().to(device)], device)[0]
    for (_, device), positions in batches.items():
        batch = [tensors[position] for position in positions]
        for position, copy in zip(positions, transmit(batch, batch[0].device, device, None), strict=True):
            moved[position] = copy
        _checked([moved[position] for position in positions], device)
    return moved
