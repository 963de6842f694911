"""Every lazy class, with what it becomes and an input. Few shapes, so that an XLA device compiles each once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.rnn import GRU, LSTM, RNN
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from devconv import lazy


@dataclass(frozen=True)
class Kind:
    """One lazy class.

    Attributes:
        make: the lazy module.
        eager: the module that it becomes with `shapes`.
        shapes: of its inputs.
        needs_spread: the input must not be constant (statistics of one value).
    """

    make: Callable[..., nn.Module]
    eager: Callable[..., nn.Module]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in self.shapes)


_LINE, _IMAGE, _VOLUME = (2, 4, 5), (2, 4, 5, 5), (2, 4, 5, 5, 5)
_NORM = {"affine": True, "track_running_stats": True}

TORCH_KINDS: dict[str, Kind] = {
    "LazyLinear": Kind(lambda **o: nn.LazyLinear(3, **o), lambda **o: nn.Linear(5, 3, **o), ((2, 5),)),
    "LazyConv1d": Kind(lambda **o: nn.LazyConv1d(3, 2, **o), lambda **o: nn.Conv1d(4, 3, 2, **o), (_LINE,)),
    "LazyConv2d": Kind(
        lambda **o: nn.LazyConv2d(6, 2, groups=2, **o), lambda **o: nn.Conv2d(4, 6, 2, groups=2, **o), (_IMAGE,)
    ),
    "LazyConv3d": Kind(lambda **o: nn.LazyConv3d(3, 2, **o), lambda **o: nn.Conv3d(4, 3, 2, **o), (_VOLUME,)),
    "LazyConvTranspose1d": Kind(
        lambda **o: nn.LazyConvTranspose1d(3, 2, **o), lambda **o: nn.ConvTranspose1d(4, 3, 2, **o), (_LINE,)
    ),
    "LazyConvTranspose2d": Kind(
        lambda **o: nn.LazyConvTranspose2d(3, 2, **o), lambda **o: nn.ConvTranspose2d(4, 3, 2, **o), (_IMAGE,)
    ),
    "LazyConvTranspose3d": Kind(
        lambda **o: nn.LazyConvTranspose3d(3, 2, **o), lambda **o: nn.ConvTranspose3d(4, 3, 2, **o), (_VOLUME,)
    ),
    "LazyBatchNorm1d": Kind(nn.LazyBatchNorm1d, lambda **o: nn.BatchNorm1d(4, **o), (_LINE,)),
    "LazyBatchNorm2d": Kind(nn.LazyBatchNorm2d, lambda **o: nn.BatchNorm2d(4, **o), (_IMAGE,)),
    "LazyBatchNorm3d": Kind(nn.LazyBatchNorm3d, lambda **o: nn.BatchNorm3d(4, **o), (_VOLUME,)),
    "LazyInstanceNorm1d": Kind(nn.LazyInstanceNorm1d, lambda **o: nn.InstanceNorm1d(4, **_NORM, **o), (_LINE,)),
    "LazyInstanceNorm2d": Kind(nn.LazyInstanceNorm2d, lambda **o: nn.InstanceNorm2d(4, **_NORM, **o), (_IMAGE,)),
    "LazyInstanceNorm3d": Kind(nn.LazyInstanceNorm3d, lambda **o: nn.InstanceNorm3d(4, **_NORM, **o), (_VOLUME,)),
}
"""Torch's own thirteen."""

OUR_KINDS: dict[str, Kind] = {
    "LazyLayerNorm": Kind(lazy.LazyLayerNorm, lambda **o: nn.LayerNorm(5, **o), (_LINE,)),
    "LazyLayerNorm-2": Kind(
        lambda **o: lazy.LazyLayerNorm(dims=2, **o), lambda **o: nn.LayerNorm((4, 5), **o), (_LINE,)
    ),
    "LazyRMSNorm": Kind(lazy.LazyRMSNorm, lambda **o: nn.RMSNorm(5, **o), (_LINE,)),
    "LazyGroupNorm": Kind(lambda **o: lazy.LazyGroupNorm(2, **o), lambda **o: nn.GroupNorm(2, 4, **o), (_LINE,)),
    "LazyRNN": Kind(lambda **o: lazy.LazyRNN(3, 2, "relu", **o), lambda **o: RNN(5, 3, 2, "relu", **o), (_LINE,)),
    "LazyLSTM": Kind(
        lambda **o: lazy.LazyLSTM(3, bidirectional=True, proj_size=2, **o),
        lambda **o: LSTM(5, 3, bidirectional=True, proj_size=2, **o),
        (_LINE,),
    ),
    "LazyGRU": Kind(lambda **o: lazy.LazyGRU(3, **o), lambda **o: GRU(5, 3, **o), (_LINE,)),
    "LazyBilinear": Kind(
        lambda **o: lazy.LazyBilinear(3, **o), lambda **o: nn.Bilinear(5, 4, 3, **o), ((2, 5), (2, 4))
    ),
    "LazyPReLU": Kind(lazy.LazyPReLU, lambda **o: nn.PReLU(4, **o), (_LINE,)),
    "LazyMultiheadAttention": Kind(
        lambda **o: lazy.LazyMultiheadAttention(2, add_bias_kv=True, **o),
        lambda **o: nn.MultiheadAttention(4, 2, add_bias_kv=True, **o),
        ((3, 2, 4),) * 3,
    ),
    "LazyMultiheadAttention-kv": Kind(
        lambda **o: lazy.LazyMultiheadAttention(2, kdim=3, vdim=5, bias=False, **o),
        lambda **o: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, bias=False, **o),
        ((3, 2, 4), (3, 2, 3), (3, 2, 5)),
    ),
}
"""Those of devconv.lazy that bring parameters torch has no lazy form for."""


class Scale(nn.Module):
    """A layer as users write them: a parameter and a buffer for each feature."""

    def __init__(self, features, device=None, dtype=None):
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.register_buffer("offset", torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.uniform_()
            self.offset.zero_()

    def forward(self, x):
        return x * self.weight + self.offset

    def extra_repr(self):
        return f"features={self.features}"


class LazyScale(LazyModuleMixin, Scale):
    """Its lazy form, by torch's documentation of ``LazyModuleMixin`` and devconv's one method."""

    cls_to_become = Scale

    def __init__(self, device=None, dtype=None):
        super().__init__(0)
        self.weight = UninitializedParameter(device=device, dtype=dtype)
        self.register_buffer("offset", UninitializedBuffer(device=device, dtype=dtype))

    def initialize_parameters(self, x):
        if self.has_uninitialized_params():
            self.features = x.shape[-1]
            with torch.no_grad():
                self.weight.materialize((self.features,))
                self.offset.materialize((self.features,))
                self.reset_parameters()

    def sizes_from_tensors(self):
        known = [tensor for tensor in (self.weight, self.offset) if not nn.parameter.is_lazy(tensor)]
        return {"features": known[0].shape[0]} if known else {}


USER_KINDS: dict[str, Kind] = {"LazyScale": Kind(LazyScale, lambda **o: Scale(5, **o), ((2, 5),))}
"""A user's own."""

KINDS = TORCH_KINDS | OUR_KINDS | USER_KINDS


def lazy_net(device: torch.device | str = "cpu") -> nn.Sequential:
    """A small model of torch's own lazy modules for inputs ``(N, 3, 8, 8)``."""
    return nn.Sequential(
        nn.LazyConv2d(4, 3, device=device),
        nn.LazyBatchNorm2d(device=device),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(2, device=device),
    )


IMAGE = (2, 3, 8, 8)


def values(module: nn.Module) -> dict[str, Any]:
    """The tensors of a module on the CPU, by name."""
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
