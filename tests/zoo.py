"""The small models that the tests share. Few shapes, so that an XLA device compiles each graph once.

Every model takes ``(batch, 4)`` and gives ``(batch, 2)`` unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import devconv

T = TypeVar("T", bound=nn.Module)


def fill(module: T, seed: int = 0) -> T:
    """Give every floating tensor of `module` random numbers that do not depend on the device's generator."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if id(tensor) in seen or not tensor.is_floating_point() or nn.parameter.is_lazy(tensor):
                continue
            seen.add(id(tensor))
            numbers = torch.randn(tensor.shape, generator=generator) * 0.5
            tensor.copy_(numbers.abs() + 0.5 if name.endswith("var") else numbers)
    return module


def mlp() -> nn.Sequential:
    """Two layers, nothing special."""
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


class Normed(nn.Module):
    """Buffers of two dtypes, persistent and not: batch norm's, and a table that ``state_dict`` does not list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.register_buffer("absent", None)
        self.last = nn.Linear(3, 2)
        self.last.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)) * self.table)


class Tied(nn.Module):
    """One matrix under three names (two modules, and twice in one), and one buffer under three names likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.decoder.again = self.encoder.weight
        self.encoder.register_buffer("mask", torch.ones(4))
        self.encoder.register_buffer("mask_again", self.encoder.mask)
        self.decoder.register_buffer("mask", self.encoder.mask)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(x) * self.encoder.mask)
        return self.last(self.decoder(hidden) * self.decoder.mask + hidden @ self.decoder.again)


class TwoPaths(nn.Module):
    """The same sub-module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.same = self.inner
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.same(torch.tanh(self.inner(x))))


class Recurrent(nn.Module):
    """An LSTM, which overrides ``_apply`` and keeps a second list of its parameters."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(4, 3, batch_first=True)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(x.unsqueeze(1))
        return self.last(hidden[:, -1])


class Attention(nn.Module):
    """A transformer layer without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.unsqueeze(1))[:, 0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "normed": Normed,
    "tied": Tied,
    "two-paths": TwoPaths,
    "recurrent": Recurrent,
    "attention": Attention,
}


class Labelled(nn.Parameter):
    """A parameter class with an init argument, a slot and a plain attribute."""

    __slots__ = ("label",)

    def __new__(cls, data: Tensor, label: str, requires_grad: bool = True) -> Self:
        made = super().__new__(cls, data, requires_grad)
        made.label = label
        made.colour = f"colour of {label}"
        return made


def batch(step: int, device: torch.device, dtype: torch.dtype, size: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one training step, different at every step, the same on every device."""
    generator = torch.Generator().manual_seed(1000 + step)
    x, y = torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)
    return x.to(device=device, dtype=dtype), y.to(device=device, dtype=dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of training step `step`, where the model's first parameter is."""
    parameter = next(model.parameters())
    x, y = batch(step, parameter.device, parameter.dtype)
    return functional.mse_loss(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on the batches that `steps` names; every gradient differs from the last. Returns the losses."""
    losses: list[Tensor] = []

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.detach())
        return loss

    for step in steps:
        optimizer.step(partial(closure, step))
        run_recorded(model)
    return [float(loss) for loss in losses]


def run_recorded(model: nn.Module) -> None:
    """Let a device that only records compute the step: otherwise it compiles one long program for all of them, where
    the second step could use the first one's."""
    for device in {parameter.device for parameter in model.parameters()}:
        if device.type == "xla":
            devconv.backend_for("xla").synchronize(device)


def nested(value: Any) -> list[Tensor]:
    """Every tensor inside nested dicts, lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for child in children for tensor in nested(child)]


Parameters = list[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-foreach": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.05),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 0.05, amsgrad=True, weight_decay=0.01),
    "adam-foreach": lambda p: torch.optim.Adam(p, 0.05, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, 0.05, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.05, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 0.05, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 0.05, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "adamax": lambda p: torch.optim.Adamax(p, 0.05),
    "asgd": lambda p: torch.optim.ASGD(p, 0.05, t0=2),
    "nadam": lambda p: torch.optim.NAdam(p, 0.05),
    "radam": lambda p: torch.optim.RAdam(p, 0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.02, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.02),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.2, max_iter=2, history_size=4),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], 0.02),
    "sparse-adam": lambda p: torch.optim.SparseAdam(p, 0.05),
}
"""Every optimizer of ``torch.optim``, with the variants that keep their state differently."""


class Looked(nn.Module):
    """An embedding with sparse gradients, for the optimizer that takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0].abs() * 3).to(torch.long).clamp(max=5))


def trained_by(name: str) -> Callable[[], nn.Module]:
    """The model that an optimizer of `OPTIMIZERS` is tried on."""
    return Looked if name == "sparse-adam" else mlp


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of an optimizer's state, named by the parameter's position, the key and the place inside it."""
    found: dict[str, Tensor] = {}
    position = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                for place, tensor in enumerate(nested(value)):
                    found[f"{position}.{key}.{place}"] = tensor
            position += 1
    return found
