"""Lazy recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# Not from torch.nn: torch_xla puts a GRU of its own there.
from torch.nn.modules.rnn import GRU, LSTM, RNN
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from .shaped import ShapedByInput

__all__ = ["LazyGRU", "LazyLSTM", "LazyRNN"]


class _LazyRecurrent(ShapedByInput):
    """Infers ``input_size`` from the last dimension of the first input, packed or not."""

    size_names = ("input_size",)
    input_size: int
    weight_ih_l0: Tensor

    def begin(self, *args: Any, **kwargs: Any) -> None:
        super().begin(1, *args, **kwargs)
        self.input_size = 0

    def initialize_parameters(self, input: Tensor | PackedSequence, hx: Any = None) -> None:  # noqa: A002
        del hx
        if self.input_size == 0:
            if isinstance(input, Tensor) and input.dim() not in (2, 3):
                raise ValueError(f"{type(self).__name__} takes 2-D or 3-D inputs, got shape {tuple(input.shape)}")
            data = input.data if isinstance(input, PackedSequence) else input
            self.take_shapes(input_size=data.shape[-1])
            self.flatten_parameters()

    def flatten_parameters(self) -> None:
        """As the torch class; nothing while there are no weights."""
        if not self.has_uninitialized_params():  # type: ignore[misc]
            super().flatten_parameters()  # type: ignore[misc]

    def sizes_from_tensors(self) -> Mapping[str, Any]:
        return {} if is_lazy(self.weight_ih_l0) else {"input_size": self.weight_ih_l0.shape[1]}

    def _options(self) -> dict[str, Any]:
        # Without dropout, about which the constructor would warn a second time.
        names = ("hidden_size", "num_layers", "bias", "batch_first", "bidirectional")
        return {name: getattr(self, name) for name in names}


class LazyRNN(_LazyRecurrent, RNN):
    """A ``torch.nn.RNN`` whose ``input_size`` is the last dimension of the first input.

    Args:
        hidden_size: features of the hidden state.
        num_layers: layers on top of each other.
        nonlinearity: ``"tanh"`` or ``"relu"``.
        bias: use biases.
        batch_first: inputs are (batch, sequence, feature).
        dropout: probability between layers.
        bidirectional: run both ways.
        device: where the parameters are going to be.
        dtype: of the parameters.
    """

    cls_to_become = RNN

    def __init__(
        self,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.begin(
            *(hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional),
            device=device,
            dtype=dtype,
        )

    def with_sizes(self, *, input_size: int) -> nn.Module:  # type: ignore[override]
        return RNN(input_size, nonlinearity=self.nonlinearity, device="meta", **self._options())


class LazyLSTM(_LazyRecurrent, LSTM):
    """A ``torch.nn.LSTM`` whose ``input_size`` is the last dimension of the first input.

    Args:
        hidden_size: features of the hidden state.
        num_layers: layers on top of each other.
        bias: use biases.
        batch_first: inputs are (batch, sequence, feature).
        dropout: probability between layers.
        bidirectional: run both ways.
        proj_size: size of the projections, 0 for none.
        device: where the parameters are going to be.
        dtype: of the parameters.
    """

    cls_to_become = LSTM

    def __init__(
        self,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.begin(
            *(hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size), device=device, dtype=dtype
        )

    def with_sizes(self, *, input_size: int) -> nn.Module:  # type: ignore[override]
        return LSTM(input_size, proj_size=self.proj_size, device="meta", **self._options())


class LazyGRU(_LazyRecurrent, GRU):
    """A ``torch.nn.GRU`` whose ``input_size`` is the last dimension of the first input.

    Args:
        hidden_size: features of the hidden state.
        num_layers: layers on top of each other.
        bias: use biases.
        batch_first: inputs are (batch, sequence, feature).
        dropout: probability between layers.
        bidirectional: run both ways.
        device: where the parameters are going to be.
        dtype: of the parameters.
    """

    cls_to_become = GRU

    def __init__(
        self,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.begin(*(hidden_size, num_layers, bias, batch_first, dropout, bidirectional), device=device, dtype=dtype)

    def with_sizes(self, *, input_size: int) -> nn.Module:  # type: ignore[override]
        return GRU(input_size, device="meta", **self._options())
