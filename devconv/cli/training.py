"""One column of the demo: a copy of the model is moved, and trained from the same weights by the same loop."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, nn

import devconv

from .minilm import Task

__all__ = ["Census", "Column", "Way", "move", "observed_routes", "train"]

LEARNING_RATE = 5e-4
WARMUP = 3
"""Steps until the learning rate is there; it falls from then on, so that a scheduler left behind would show."""

Routes = dict[str, dict[str, int]]
"""Kind of tensor (``"parameter"``, ``"buffer"``) -> route -> number of tensors."""


class Way(StrEnum):
    """How a column's model gets to the device."""

    CPU = "cpu"
    """It stays where it was loaded."""
    STOCK = "stock"
    """``model.to(device)``, as torch does it."""
    DEVCONV = "devconv"
    """``model.to(device)`` with the flag on."""


@dataclass(frozen=True)
class Census:
    """What there is of a model.

    Attributes:
        parameters: number of distinct parameters.
        in_optimizer: how many of them the optimizer holds.
        tied: number of tensors that stand under more than one name.
    """

    parameters: int
    in_optimizer: int
    tied: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Census:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        return cls(len(names), len(names.keys() & held), sum(count > 1 for count in names.values()))


@dataclass
class Column:
    """What was measured of one way.

    Attributes:
        way: the way.
        device: where the model was trained.
        before: the model as it was loaded.
        after: the model on its device; None until it has arrived.
        routes: how each tensor got there.
        bytes: bytes that arrived on the device.
        losses: one for each step.
        learning_rate: after the last step.
        seconds: wall-clock time of the whole column, compilation included.
        error: what was raised, empty if nothing was.
    """

    way: Way
    device: str
    before: Census
    after: Census | None = None
    routes: Routes = field(default_factory=dict)
    bytes: int = 0
    losses: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    seconds: float = 0.0
    error: str = ""


def train(task: Task, way: Way, device: torch.device, steps: int, on_step: Callable[[int], None]) -> Column:
    """Move a copy of the task's model and train it.

    The optimizer and the learning rate's scheduler are built before the move, as programs do that load a model first
    and learn of their device later.

    Args:
        task: where every column starts.
        way: how the model gets to `device`.
        device: with its index.
        steps: number of optimizer steps.
        on_step: called with the number of steps done.

    Returns:
        The figures. What the move or the training raises is one of them, except on the CPU.
    """
    started = time.perf_counter()
    model = copy.deepcopy(task.model)
    # The defaults, in every column: torch's own choice of implementation for the device.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1 - step / (2 * steps + WARMUP))
    )
    column = Column(way, str(device), Census.of(model, optimizer))
    try:
        move(model, way, device, column)
        column.after = Census.of(model, optimizer)
        batch = {name: tensor.to(device) for name, tensor in task.batch.items()}
        for step in range(steps):
            column.losses.append(_step(model, batch, optimizer, device))
            scheduler.step()
            on_step(step + 1)
    except Exception as error:
        if way is Way.CPU:
            raise
        column.error = f"{type(error).__name__}: {error}"
    column.learning_rate = float(scheduler.get_last_lr()[0])
    column.seconds = time.perf_counter() - started
    return column


def _step(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """One step of training, and one graph for XLA.

    With torch_xla 2.9.0 two graphs are compiled for a whole column: AdamW makes its state in the first step, and from
    the second on nothing changes, because step count and learning rate are inputs of the graph and not constants of
    it (UncachedCompile of torch_xla.debug.metrics stays where it is). Two things are the way they are for that:

    - `model.zero_grad`, where programs often write `optimizer.zero_grad`: an optimizer that lost its parameters
      clears no gradients, they add up from the second step on, and stock torch's column would compile once more;
    - no synchronisation between `backward` and `step`. It would make the second graph small, but gradients are then
      wrong from the third step on (torch_xla 2.9.0, MiniLM on the CPU), unless XLA_ENABLE_PARAM_ALIASING=0.
    """
    loss: Tensor = model(**batch).loss
    model.zero_grad()
    loss.backward()
    optimizer.step()
    _, backend = devconv.resolve(device)
    backend.synchronize(device)
    return loss.item()


def move(model: nn.Module, way: Way, device: torch.device, column: Column) -> None:
    """Move a model by one of the three ways, and write the routes and bytes down."""
    if way is Way.CPU:
        return
    before = _tensors(model)
    # False, and not just "not on": stock torch's column is stock torch's whatever the process has set.
    with devconv.registry_conversion(way is Way.DEVCONV):
        model.to(device)
    report = devconv.last_report() if way is Way.DEVCONV else None
    if report is None:
        column.routes, column.bytes = observed_routes(before, _tensors(model))
        return
    column.bytes = report.bytes
    for item in report.items:
        routes = column.routes.setdefault(item.kind, {})
        routes[str(item.route)] = routes.get(str(item.route), 0) + 1


def _tensors(model: nn.Module) -> dict[str, tuple[Tensor, torch.device]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (tensor, tensor.device) for name, tensor in named}


def observed_routes(
    before: dict[str, tuple[Tensor, torch.device]], after: dict[str, tuple[Tensor, torch.device]]
) -> tuple[Routes, int]:
    """Routes and bytes of a move that nobody reported, read off the tensors: by object and device, under each name.

    The same object on another device was updated in place (``set-data``); another object took its place
    (``overwrite``).
    """
    routes: Routes = {}
    arrived: dict[int, int] = {}
    for name, (tensor, device) in after.items():
        old, old_device = before[name]
        if id(tensor) in arrived or (tensor is old and device == old_device):
            continue
        arrived[id(tensor)] = tensor.numel() * tensor.element_size()
        kind = routes.setdefault("parameter" if isinstance(tensor, nn.Parameter) else "buffer", {})
        route = str(devconv.Route.SET_DATA if tensor is old else devconv.Route.OVERWRITE)
        kind[route] = kind.get(route, 0) + 1
    return routes, sum(arrived.values())
