"""Lazy multi-head attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from devconv import torch_internals as internals

from .pending import is_pending
from .shaped import ShapedByInput

__all__ = ["LazyMultiheadAttention"]


class LazyOutput(ShapedByInput, NonDynamicallyQuantizableLinear):
    """The output projection of a `LazyMultiheadAttention`, which initialises it: attention never calls it."""

    cls_to_become = NonDynamicallyQuantizableLinear
    size_names = ("in_features", "out_features")

    def __init__(self, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
        self.begin(1, 1, bias, device=device, dtype=dtype)
        self.in_features = self.out_features = 0

    def initialize_parameters(self, input: Tensor) -> None:  # noqa: A002 - the name that forward() has
        if self.in_features == 0:
            self.take_shapes(features=input.shape[-1])

    def with_sizes(self, *, features: int) -> nn.Module:  # type: ignore[override]
        return NonDynamicallyQuantizableLinear(features, features, self.bias is not None, device="meta")

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        if is_lazy(self.weight):
            return {}
        return {"out_features": self.weight.shape[0], "in_features": self.weight.shape[1]}


class LazyMultiheadAttention(ShapedByInput, nn.MultiheadAttention):
    """A ``torch.nn.MultiheadAttention`` whose ``embed_dim`` is the last dimension of the first query.

    Which parameters there are depends on ``kdim`` and ``vdim``, and must not change when an optimizer has them: leave
    both out for keys and values of the query's size, give them otherwise.

    Args:
        num_heads: parallel attention heads.
        dropout: probability on the attention weights.
        bias: use biases in the projections.
        add_bias_kv: add a bias to the key and value sequences.
        add_zero_attn: add a batch of zeros to the key and value sequences.
        kdim: features of keys, None for ``embed_dim``.
        vdim: features of values, None for ``embed_dim``.
        batch_first: inputs are (batch, sequence, feature).
        device: where the parameters are going to be.
        dtype: of the parameters.
    """

    cls_to_become = nn.MultiheadAttention
    size_names = ("embed_dim", "head_dim", "kdim", "vdim")

    def __init__(
        self,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        # Torch takes one projection for all where kdim and vdim equal embed_dim: the placeholder must equal neither.
        placeholder = next(size for size in (num_heads, 2 * num_heads, 3 * num_heads) if size not in (kdim, vdim))
        self.begin(
            *(placeholder, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first),
            device=device,
            dtype=dtype,
        )
        self.out_proj = LazyOutput(bias, device, dtype)
        self.embed_dim = self.head_dim = 0
        self.kdim, self.vdim = kdim or 0, vdim or 0

    def initialize_parameters(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        if is_pending(self.out_proj):
            internals.infer_parameters(self.out_proj, (query,), {})
        if self.embed_dim == 0:
            embed_dim = query.shape[-1]
            kdim, vdim = self.kdim or embed_dim, self.vdim or embed_dim
            if self.in_proj_weight is None and kdim == vdim == embed_dim:
                raise ValueError(f"kdim and vdim equal the query's size, {embed_dim}: leave them out")
            if (key.shape[-1], value.shape[-1]) != (kdim, vdim):
                raise ValueError(
                    f"keys and values have {key.shape[-1]} and {value.shape[-1]} features, expected {kdim} and {vdim}: "
                    f"give kdim and vdim to the constructor"
                )
            self.take_shapes(embed_dim=embed_dim, kdim=kdim, vdim=vdim)

    def reset_parameters(self) -> None:
        """Draw the projections; the torch class has no public method for it."""
        if not self.has_uninitialized_params():
            internals.reset_attention(self)

    def with_sizes(self, *, embed_dim: int, kdim: int, vdim: int) -> nn.Module:  # type: ignore[override]
        return nn.MultiheadAttention(
            embed_dim,
            self.num_heads,
            bias=self.in_proj_bias is not None,
            add_bias_kv=self.bias_k is not None,
            kdim=kdim,
            vdim=vdim,
            device="meta",
        )

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        query = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        if query is None or is_lazy(query):
            return {}
        embed_dim = query.shape[1]
        sizes = {"embed_dim": embed_dim, "head_dim": embed_dim // self.num_heads}
        return sizes | {"kdim": self.kdim or embed_dim, "vdim": self.vdim or embed_dim}
