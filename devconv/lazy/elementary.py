"""Lazy layers with one weight: bilinear and PReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .shaped import ShapedByInput

__all__ = ["LazyBilinear", "LazyPReLU"]


class LazyBilinear(ShapedByInput, nn.Bilinear):
    """A ``torch.nn.Bilinear`` whose ``in1_features`` and ``in2_features`` are the last dimensions of the first inputs.

    Args:
        out_features: size of each output.
        bias: learn a bias.
        device: where the parameters are going to be.
        dtype: of the parameters.
    """

    cls_to_become = nn.Bilinear
    size_names = ("in1_features", "in2_features")

    def __init__(self, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
        self.begin(1, 1, out_features, bias, device=device, dtype=dtype)
        self.in1_features = self.in2_features = 0

    def initialize_parameters(self, input1: Tensor, input2: Tensor) -> None:
        if self.in1_features == 0:
            self.take_shapes(in1_features=input1.shape[-1], in2_features=input2.shape[-1])

    def with_sizes(self, *, in1_features: int, in2_features: int) -> nn.Module:  # type: ignore[override]
        return nn.Bilinear(in1_features, in2_features, self.out_features, self.bias is not None, device="meta")

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        if is_lazy(self.weight):
            return {}
        return {"in1_features": self.weight.shape[1], "in2_features": self.weight.shape[2]}


class LazyPReLU(ShapedByInput, nn.PReLU):
    """A ``torch.nn.PReLU`` with one slope for each channel of the first input (its second dimension, if it has two).

    Args:
        init: initial slope.
        device: where the parameter is going to be.
        dtype: of the parameter.
    """

    cls_to_become = nn.PReLU
    size_names = ("num_parameters",)

    def __init__(self, init: float = 0.25, device: Any = None, dtype: Any = None) -> None:
        self.begin(1, init, device=device, dtype=dtype)
        self.num_parameters = 0

    def initialize_parameters(self, input: Tensor) -> None:  # noqa: A002 - the name that forward() has
        if self.num_parameters == 0:
            self.take_shapes(num_parameters=input.shape[1] if input.dim() > 1 else 1)

    def with_sizes(self, *, num_parameters: int) -> nn.Module:  # type: ignore[override]
        return nn.PReLU(num_parameters, self.init, device="meta")

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        return {} if is_lazy(self.weight) else {"num_parameters": self.weight.shape[0]}
