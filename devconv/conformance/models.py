"""The small models of the checks. Every one takes ``(batch, 4)`` and gives ``(batch, 2)``, so that a device that
compiles has few graphs to compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .lane import Lane

__all__ = ["Flat", "Normed", "Tied", "batch", "mlp", "numbers", "steps", "targets"]


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    """The same numbers on every call, on the host: no generator is touched."""
    count = int(torch.Size(shape).numel())
    return (torch.sin(torch.arange(1.0, count + 1) * 12.9898) * scale).reshape(shape)


def batch() -> Tensor:
    """Inputs for every model here."""
    return numbers(6, 4)


def targets() -> Tensor:
    """What the models are trained towards."""
    return numbers(6, 2, scale=2.0)


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(numbers(*parameter.shape, scale=0.5))


def mlp() -> Any:
    """Two layers and nothing special: an ``nn.Sequential``, whose items have no types."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    _fill(module)
    return module


class Tied(nn.Module):
    """One matrix in two modules, and one buffer in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        _fill(self)
        self.decoder.weight = self.encoder.weight
        mask = numbers(4)
        self.encoder.register_buffer("mask", mask)
        self.decoder.register_buffer("mask", mask)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(inputs) * self.encoder.mask)
        out: Tensor = self.last(self.decoder(hidden) * self.decoder.mask)
        return out


class Normed(nn.Module):
    """Buffers: batch norm's, and one that ``state_dict`` does not list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        _fill(self)
        self.register_buffer("table", numbers(4), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(inputs)) * self.table)
        return out


class Flat(nn.Module):
    """Two parameters that are parts of one flat buffer."""

    whole: Tensor

    def __init__(self) -> None:
        super().__init__()
        whole = numbers(24, scale=0.5)
        self.register_buffer("whole", whole)
        self.first = nn.Parameter(whole[:16].view(4, 4))
        self.second = nn.Parameter(whole[16:].view(2, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.first) @ self.second.t()


def steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    prepare: Callable[[Tensor], Tensor],
    lane: Lane,
    count: int = 3,
) -> list[float]:
    """Train `module` for `count` steps.

    Args:
        module: takes a batch of `batch`.
        optimizer: of its parameters; one that needs a closure gets one.
        prepare: puts a host tensor where the module is.
        lane: the device; its queue is emptied after every step, so that each step is one graph.
        count: steps.

    Returns:
        The loss before each step.
    """
    inputs, wanted = prepare(batch()), prepare(targets())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = ((module(inputs) - wanted) ** 2).mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(count):
        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        lane.backend.synchronize()
        losses.append(loss.item() if lane.has_values and loss is not None else 0.0)
    return losses
