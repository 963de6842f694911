"""The numbers of a lazy module (``in_features``, ``num_features``) that follow from tensors it has already.

Torch reads them off the first input only, so a module that was filled from a checkpoint, or shares its weight with one
that was initialised earlier, keeps zeros there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from devconv import torch_internals as internals

__all__ = ["knows_its_tensors", "own_tensors", "settle_sizes"]

_CONVOLUTIONS = (nn.LazyConv1d, nn.LazyConv2d, nn.LazyConv3d)
_TRANSPOSED = (nn.LazyConvTranspose1d, nn.LazyConvTranspose2d, nn.LazyConvTranspose3d)
_NORMS = (
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
)
_TORCH = (nn.LazyLinear, *_CONVOLUTIONS, *_TRANSPOSED, *_NORMS)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that `module` holds itself, by its own names."""
    held = {**internals.parameters_of(module), **internals.buffers_of(module)}
    return {key: tensor for key, tensor in held.items() if tensor is not None}


def knows_its_tensors(module: nn.Module) -> bool:
    """Whether every tensor of this (still lazy) module is known to be made by its `initialize_parameters`."""
    return isinstance(module, _TORCH) or hasattr(module, "sizes_from_tensors")


def sizes_of(module: nn.Module) -> Mapping[str, Any] | None:
    """Attributes of a still lazy module that its initialised tensors determine; None if nothing is known of it.

    A lazy module of one's own answers through a method ``sizes_from_tensors(self) -> Mapping[str, Any]``.
    """
    known = {key: tensor for key, tensor in own_tensors(module).items() if not is_lazy(tensor)}
    weight = known.get("weight")
    if isinstance(module, nn.LazyLinear):
        return {} if weight is None else {"in_features": weight.shape[1]}
    if isinstance(module, _CONVOLUTIONS):
        return {} if weight is None else {"in_channels": weight.shape[1] * module.groups}
    if isinstance(module, _TRANSPOSED):
        return {} if weight is None else {"in_channels": weight.shape[0]}
    if isinstance(module, _NORMS):
        vectors = [tensor for tensor in known.values() if tensor.dim() == 1]
        return {"num_features": vectors[0].shape[0]} if vectors else {}
    ask = getattr(module, "sizes_from_tensors", None)
    return None if ask is None else ask()


def settle_sizes(module: nn.Module) -> bool:
    """Write the numbers that follow from `module`'s tensors into it.

    Returns:
        Whether the module is one whose numbers are known to follow from its tensors.
    """
    sizes = sizes_of(module)
    for name, size in (sizes or {}).items():
        setattr(module, name, size)
    return sizes is not None


def channels_first_of_norm(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """`num_features` of one of torch's lazy norms for an input of `shape` ``(N, C, ...)``; None for other modules."""
    return shape[1] if isinstance(module, _NORMS) and len(shape) > 1 else None
