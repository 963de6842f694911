"""A tensor's description, where only its shape matters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TensorSpec"]


@dataclass(frozen=True)
class TensorSpec:
    """Stands for a tensor in the inputs of `devconv.materialize`.

    Attributes:
        shape: sizes, outermost first.
        dtype: of the tensor; an embedding needs an integer type.

    >>> TensorSpec((8, 128), torch.int64)
    TensorSpec(shape=(8, 128), dtype=torch.int64)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        sizes = tuple(operator.index(size) for size in shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"TensorSpec sizes are counts, got {sizes}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"TensorSpec takes a torch.dtype, got {dtype!r}")
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "dtype", dtype)

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor of this shape and dtype on `device`, all zeros: every number is a valid index, and nothing is NaN."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)
