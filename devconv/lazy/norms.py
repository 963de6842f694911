"""Lazy normalisation layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .shaped import ShapedByInput

__all__ = [
    "LazyGroupNorm",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
    "LazyLayerNorm",
    "LazyRMSNorm",
]


def _trailing(shape: tuple[int, ...], dims: int, cls: type) -> tuple[int, ...]:
    if len(shape) < dims:
        raise ValueError(f"{cls.__name__} normalises {dims} dimensions, the input has shape {tuple(shape)}")
    return tuple(shape[len(shape) - dims :])


def _shape_of(*tensors: Tensor | None) -> tuple[int, ...] | None:
    return next((tuple(tensor.shape) for tensor in tensors if tensor is not None and not is_lazy(tensor)), None)


class LazyLayerNorm(ShapedByInput, nn.LayerNorm):
    """A ``torch.nn.LayerNorm`` whose ``normalized_shape`` is the last dimensions of the first input.

    Args:
        eps: added to the variance.
        elementwise_affine: learn a weight (and a bias) for each element.
        bias: learn a bias.
        device: where the parameters are going to be.
        dtype: of the parameters.
        dims: number of dimensions to normalise.

    >>> import torch
    >>> layer = LazyLayerNorm()
    >>> layer(torch.zeros(2, 5)).shape, layer
    (torch.Size([2, 5]), LayerNorm((5,), eps=1e-05, elementwise_affine=True...))
    """

    cls_to_become = nn.LayerNorm
    size_names = ("normalized_shape",)

    def __init__(
        self,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        dims: int = 1,
    ) -> None:
        self.begin((0,) * dims, eps, elementwise_affine, bias, device=device, dtype=dtype)

    def initialize_parameters(self, input: Tensor) -> None:  # noqa: A002 - the name that forward() has
        if 0 in self.normalized_shape:
            self.take_shapes(normalized_shape=_trailing(input.shape, len(self.normalized_shape), type(self)))

    def with_sizes(self, *, normalized_shape: tuple[int, ...]) -> nn.Module:  # type: ignore[override]
        bias = self.bias is not None
        return nn.LayerNorm(normalized_shape, self.eps, self.elementwise_affine, bias, device="meta")

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        shape = _shape_of(self.weight, self.bias)
        return {} if shape is None else {"normalized_shape": shape}


class LazyRMSNorm(ShapedByInput, nn.RMSNorm):
    """A ``torch.nn.RMSNorm`` whose ``normalized_shape`` is the last dimensions of the first input.

    Args:
        eps: added to the mean square; None for the machine epsilon of the computation.
        elementwise_affine: learn a weight for each element.
        device: where the parameters are going to be.
        dtype: of the parameters.
        dims: number of dimensions to normalise.
    """

    cls_to_become = nn.RMSNorm
    size_names = ("normalized_shape",)

    def __init__(
        self,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        dims: int = 1,
    ) -> None:
        self.begin((0,) * dims, eps, elementwise_affine, device=device, dtype=dtype)

    def initialize_parameters(self, x: Tensor) -> None:
        if 0 in self.normalized_shape:
            self.take_shapes(normalized_shape=_trailing(x.shape, len(self.normalized_shape), type(self)))

    def with_sizes(self, *, normalized_shape: tuple[int, ...]) -> nn.Module:  # type: ignore[override]
        return nn.RMSNorm(normalized_shape, self.eps, self.elementwise_affine, device="meta")

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        shape = _shape_of(self.weight)
        return {} if shape is None else {"normalized_shape": shape}


class LazyGroupNorm(ShapedByInput, nn.GroupNorm):
    """A ``torch.nn.GroupNorm`` whose ``num_channels`` is the second dimension of the first input.

    Args:
        num_groups: groups that the channels are divided into.
        eps: added to the variance.
        affine: learn a weight and a bias for each channel.
        device: where the parameters are going to be.
        dtype: of the parameters.
        bias: learn a bias; False needs a torch whose GroupNorm has the argument.
    """

    cls_to_become = nn.GroupNorm
    size_names = ("num_channels",)

    def __init__(
        self,
        num_groups: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        self.begin(num_groups, num_groups, eps, affine, device=device, dtype=dtype, **({} if bias else {"bias": False}))
        self.num_channels = 0

    def initialize_parameters(self, input: Tensor) -> None:  # noqa: A002 - the name that forward() has
        if self.num_channels == 0:
            if input.dim() < 2:
                raise ValueError(f"GroupNorm takes inputs (N, C, *), got shape {tuple(input.shape)}")
            self.take_shapes(num_channels=input.shape[1])

    def with_sizes(self, *, num_channels: int) -> nn.Module:  # type: ignore[override]
        options: dict[str, Any] = {"bias": False} if self.affine and self.bias is None else {}
        return nn.GroupNorm(self.num_groups, num_channels, self.eps, self.affine, device="meta", **options)

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        shape = _shape_of(self.weight, self.bias)
        return {} if shape is None else {"num_channels": shape[0]}


class _LazyChannels:
    """Torch's lazy instance norms take the second dimension even of an unbatched input, and forget the number."""

    unbatched_dims: ClassVar[int]

    def initialize_parameters(self, input: Tensor) -> None:  # noqa: A002 - the name that forward() has
        batched = input.unsqueeze(0) if input.dim() == self.unbatched_dims else input
        super().initialize_parameters(batched)  # type: ignore[misc]
        self.num_features = batched.shape[1]


class LazyInstanceNorm1d(_LazyChannels, nn.LazyInstanceNorm1d):
    """``torch.nn.LazyInstanceNorm1d`` with the defaults of ``InstanceNorm1d``: neither parameters nor statistics.

    Args:
        eps: added to the variance.
        momentum: of the running statistics.
        affine: learn a weight and a bias for each channel.
        track_running_stats: keep running statistics.
        device: where the tensors are going to be.
        dtype: of the tensors.
    """

    cls_to_become = nn.InstanceNorm1d
    unbatched_dims = 2

    def __init__(
        self,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(eps, momentum, affine, track_running_stats, device, dtype)


class LazyInstanceNorm2d(_LazyChannels, nn.LazyInstanceNorm2d):
    """As `LazyInstanceNorm1d`, for images."""

    cls_to_become = nn.InstanceNorm2d
    unbatched_dims = 3

    def __init__(
        self,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(eps, momentum, affine, track_running_stats, device, dtype)


class LazyInstanceNorm3d(_LazyChannels, nn.LazyInstanceNorm3d):
    """As `LazyInstanceNorm1d`, for volumes."""

    cls_to_become = nn.InstanceNorm3d
    unbatched_dims = 4

    def __init__(
        self,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(eps, momentum, affine, track_running_stats, device, dtype)
