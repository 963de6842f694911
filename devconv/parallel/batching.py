"""Cutting inputs into one batch for each replica, and putting outputs together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from devconv.errors import BatchError, GatherError

from .graph import travel
from .nesting import leaves, parts, rebuild, remake

__all__ = ["Cut", "Inputs", "bring", "gather", "shares"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def shares(size: int, count: int) -> list[int]:
    """Sizes of the batches of at most `count` replicas, as even as possible; none is empty, unless all there is.

    >>> shares(10, 4), shares(2, 4), shares(0, 4)
    ([3, 3, 2, 2], [1, 1], [0])
    """
    used = max(1, min(size, count))
    return [size // used + (position < size % used) for position in range(used)]


class Cut:
    """Inputs cut into batches that have not been sent yet: devices are chosen by their number.

    Attributes:
        count: number of batches, at most as many as were allowed. Without a tensor to cut it is 1: the number of
            devices does not decide how often a model runs.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int, dim: int) -> None:
        """Cut the inputs of one call.

        Args:
            args: positional inputs; tensors of any nesting are cut along `dim`, those without dimensions and those in
                a `Whole` go to every replica, and so does everything that is no tensor, as the same object.
            kwargs: keyword inputs, likewise.
            count: at most so many batches.
            dim: the batch dimension.

        Raises:
            BatchError: tensors differ in the size of their batch, or have no dimension `dim`, or a packed sequence
                was passed.
        """
        self._value = (args, kwargs)
        _refuse_packed(self._value)
        found = [(_argument(path), tensor, whole or tensor.dim() == 0) for path, tensor, whole in leaves(self._value)]
        size = _batch_size(found, dim)
        sizes = [1] if size is None else shares(size, count)
        self.count = len(sizes)
        self._pieces: list[Sequence[Tensor]] = [
            [tensor] * self.count if whole else tensor.split(sizes, dim) for _, tensor, whole in found
        ]

    def send(self, devices: Sequence[torch.device]) -> list[Inputs]:
        """The inputs of each replica, on its device.

        Args:
            devices: `count` indexed devices.

        Returns:
            `count` pairs of positional and keyword inputs.
        """
        flat = [pieces[position] for position in range(self.count) for pieces in self._pieces]
        moved = iter(travel(flat, [device for device in devices for _ in self._pieces]))
        return [rebuild(self._value, moved) for _ in devices]


def _argument(path: str) -> str:
    """The path of a tensor as the caller knows it.

    >>> _argument("[0][1]['mask']"), _argument("[1]['x'][2]")
    ("argument 1['mask']", "argument 'x'[2]")
    """
    kind, rest = path[:3], path[4:]
    head, _, tail = rest.partition("]")
    return f"argument {head}{tail}" if kind in ("[0]", "[1]") else f"argument {path}"


def _refuse_packed(value: Any, path: str = "") -> None:
    if isinstance(value, PackedSequence):
        raise BatchError(
            _argument(path),
            "a packed sequence is sorted and packed as one batch, and cannot be cut",
            "Pass the padded tensor and the lengths, and pack inside the module's forward.",
        )
    for step, item in parts(value) or ():
        _refuse_packed(item, path + step)


def _batch_size(found: list[tuple[str, Tensor, bool]], dim: int) -> int | None:
    size, first = None, ""
    for path, tensor, whole in found:
        if whole:
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise BatchError(
                path,
                f"it has shape {tuple(tensor.shape)}, and no dimension {dim} to cut it along",
                "Give it a batch dimension, or pass devconv.parallel.Whole(tensor) for every replica to get it whole.",
            )
        if size is None:
            size, first = tensor.size(dim), path
        elif tensor.size(dim) != size:
            raise BatchError(
                path,
                f"it has size {tensor.size(dim)} in dimension {dim}, while {first} has {size}",
                "Expand it to the batch, or pass devconv.parallel.Whole(tensor) for every replica to get it whole.",
            )
    return size


def bring(output: Any, device: torch.device) -> Any:
    """An output with all its tensors on `device`; those that are there already are the same objects."""
    found = [tensor for _, tensor, _ in leaves(output)]
    return rebuild(output, iter(travel(found, [device] * len(found))))


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """One output from those of all replicas.

    Args:
        outputs: one for each replica, of one structure.
        device: where the result's tensors are wanted.
        dim: the dimension along which tensors are put together; those without dimensions become a vector with one
            element for each replica.

    Returns:
        The structure of ``outputs[0]``, on `device`.

    Raises:
        GatherError: the outputs differ in structure, or in something that is no tensor.
    """
    found = [tensor for output in outputs for _, tensor, _ in leaves(output)]
    moved = iter(travel(found, [device] * len(found)))
    return _merge([rebuild(output, moved) for output in outputs], dim, "output")


def _merge(items: list[Any], dim: int, path: str) -> Any:
    first = items[0]
    if isinstance(first, Tensor):
        return _join(items, dim, path)
    held = parts(first)
    if held is None or isinstance(first, str):
        if all(_equal(first, item) for item in items[1:]):
            return first
        raise GatherError(
            path,
            f"the replicas returned different values that are no tensors: {', '.join(map(repr, items[:4]))}",
            "Return a tensor with a batch dimension, or the same value from every replica.",
        )
    return remake(first, list(_merge_parts(items, held, dim, path)))


def _merge_parts(items: list[Any], held: list[tuple[str, Any]], dim: int, path: str) -> Iterator[Any]:
    steps = [step for step, _ in held]
    columns: list[list[Any]] = [[] for _ in steps]
    for item in items:
        others = dict(parts(item) or ()) if type(item) is type(items[0]) else {}
        if set(others) != set(steps):
            raise GatherError(
                path,
                f"one replica returned {_describe(items[0])}, another {_describe(item)}",
                "Return the same structure from every replica.",
            )
        for column, step in zip(columns, steps, strict=True):
            column.append(others[step])
    for step, column in zip(steps, columns, strict=True):
        yield _merge(column, dim, path + step)


def _describe(value: Any) -> str:
    held = parts(value)
    kind = type(value).__name__
    return kind if held is None else f"{kind} with {len(held)} parts ({', '.join(step for step, _ in held[:4])})"


def _join(tensors: list[Any], dim: int, path: str) -> Tensor:
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise GatherError(
            path,
            f"one replica returned a tensor, another {next(type(t).__name__ for t in tensors if not isinstance(t, Tensor))}",
            "Return the same structure from every replica.",
        )
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    try:
        return torch.cat(tensors, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
        raise GatherError(
            path,
            f"tensors of shapes {shapes} cannot be joined along dimension {dim} ({error})",
            "Return tensors that differ in the batch dimension only.",
        ) from error


def _equal(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and bool(left == right))
