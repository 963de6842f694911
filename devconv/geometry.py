"""Where a tensor lies in its storage, for tensors that share one; remembered for devices that cannot tell.

XLA reports the storage offset of every view as 0. So what was known on the way there is recorded: outside the tensors,
keyed by TensorImpl, for as long as the storage lives, and checked again before it is believed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import torch_internals as internals

__all__ = ["Geometry", "geometry_of", "recall", "record", "scatter", "span_of", "succeed"]


class Geometry(NamedTuple):
    """A tensor's place in its storage, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One past the last element.

        >>> Geometry((2, 3), (3, 1), 4).end
        10
        """
        if 0 in self.size:
            return self.offset
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)) + 1


def geometry_of(tensor: Tensor) -> Geometry:
    """The place of a tensor on a device that keeps strides."""
    return Geometry(tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))


def span_of(geometries: Iterable[Geometry]) -> tuple[int, int]:
    """First element and number of elements that cover all of `geometries`.

    >>> span_of([Geometry((2,), (1,), 3), Geometry((2, 2), (2, 1), 4)])
    (3, 5)
    """
    places = list(geometries)
    first = min(place.offset for place in places)
    return first, max(max(place.end for place in places) - first, 0)


def scatter(flat: Tensor, values: Tensor, place: Geometry, first: int) -> None:
    """Write a tensor's values to its place in a flat tensor that begins at element `first`; both on the host."""
    # An expanded dimension has one element in storage, and copy_ refuses to write it twice.
    size = tuple(
        1 if stride == 0 and extent else extent for extent, stride in zip(place.size, place.stride, strict=True)
    )
    for dim, extent in enumerate(size):
        values = values.narrow(dim, 0, extent)
    flat.as_strided(size, place.stride, place.offset - first).copy_(values)


_lock = threading.Lock()
_records: dict[int, tuple[StorageWeakRef, dict[int, Geometry]]] = {}


def record(tensors: list[Tensor], places: list[Geometry]) -> None:
    """Remember the places of tensors that share one storage on a device that cannot tell them."""
    storage = tensors[0].untyped_storage()
    with _lock:
        for key in [key for key, (alive, _) in _records.items() if alive.expired()]:
            del _records[key]
        _records[internals.storage_of(tensors[0])] = (
            StorageWeakRef(storage),
            {internals.impl_of(tensor): place for tensor, place in zip(tensors, places, strict=True)},
        )


def succeed(old: Tensor, new: Tensor) -> None:
    """Let `new`, a tensor on the storage of `old`, have the place that was recorded for `old`."""
    with _lock:
        _, places = _records.get(internals.storage_of(old), (None, {}))
        if internals.impl_of(old) in places:
            places[internals.impl_of(new)] = places[internals.impl_of(old)]


def recall(tensors: list[Tensor]) -> list[Geometry] | None:
    """The recorded places of tensors that share one storage, None where they are not known for all of them.

    Tensors that all cover the same elements in the same order need no record.
    """
    with _lock:
        alive, places = _records.get(internals.storage_of(tensors[0]), (None, {}))
    if alive is not None and not alive.expired():
        found = [places.get(internals.impl_of(tensor)) for tensor in tensors]
        if all(
            place is not None and place.size == tuple(tensor.size())
            for place, tensor in zip(found, tensors, strict=True)
        ):
            return [place for place in found if place is not None]
    if len({(tuple(tensor.size()), tuple(tensor.stride())) for tensor in tensors}) == 1 and _covers(tensors[0]):
        return [Geometry(tuple(tensor.size()), tuple(tensor.stride()), 0) for tensor in tensors]
    return None


def _covers(tensor: Tensor) -> bool:
    # A contiguous tensor as large as its storage begins at its beginning.
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
