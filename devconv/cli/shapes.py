"""The demo on ``meta``: no values, so the plan of the move and the shapes that come out."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import devconv

from .minilm import Task
from .series import amount
from .training import Census, Column, Way, move

__all__ = ["Shapes", "examine"]


@dataclass(frozen=True)
class Shapes:
    """What is known without values.

    Attributes:
        plan: of the move; nothing is left of the model in it.
        stock: the model as stock torch moves it.
        devconv: the model as devconv moves it.
        shapes: name of an output -> its shape on the CPU, and after devconv's move.
    """

    plan: devconv.Plan
    stock: Column
    devconv: Column
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def holds(self) -> bool:
        """Whether devconv changed nothing but the device."""
        same = all(before == after for before, after in self.shapes.values())
        return same and self.devconv.after == self.devconv.before

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plan": json.loads(self.plan.to_json()),
            "columns": {str(column.way): asdict(column) for column in (self.stock, self.devconv)},
            "shapes": {name: {"cpu": before, "moved": after} for name, (before, after) in self.shapes.items()},
        }

    def show(self, screen: Console) -> None:
        """Print the plan, grouped (``print(devconv.plan(...))`` lists every tensor), and the shapes."""
        plan = Table(title=f"plan for {self.plan.what}", title_justify="left")
        for heading in ("tensors", "route", "from", "to"):
            plan.add_column(heading)
        plan.add_column("bytes", justify="right")
        groups = Counter((item.kind, str(item.route), item.source, item.target) for item in self.plan.items)
        for (kind, route, source, target), number in groups.items():
            group = (kind, route, source, target)
            total = sum(
                item.bytes for item in self.plan.items if (item.kind, item.route, item.source, item.target) == group
            )
            plan.add_row(f"{number} x {kind}", route, source, target, amount(total))
        screen.print(plan)
        for refusal in self.plan.refusals:
            screen.print(f"refused: {refusal}")
        shapes = Table(title="shapes and counts", title_justify="left")
        for heading in ("", "CPU", f"{self.devconv.device}, stock torch", f"{self.devconv.device}, devconv"):
            shapes.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
        for name in ("parameters", "in_optimizer", "tied"):
            cells = [getattr(census, name) for census in (self.devconv.before, self.stock.after, self.devconv.after)]
            label = {"in_optimizer": "of them in the optimizer", "tied": "tied tensors"}.get(name, name)
            shapes.add_row(label, *map(str, cells))
        for name, (before, after) in self.shapes.items():
            shapes.add_row(name, _shape(before), "", _shape(after))
        screen.print(shapes)


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"


def examine(task: Task, device: torch.device) -> Shapes:
    """Plan the move to a device without values, carry it out, and run the model there."""
    plan = devconv.plan(task.model, device)
    plan.release()
    before = _outputs(task.model, task, torch.device("cpu"))
    columns = {}
    for way in (Way.STOCK, Way.DEVCONV):
        model = copy.deepcopy(task.model)
        optimizer = torch.optim.AdamW(model.parameters())
        column = columns[way] = Column(way, str(device), Census.of(model, optimizer))
        move(model, way, device, column)
        column.after = Census.of(model, optimizer)
    after = _outputs(model, task, device)
    shapes = {name: (before[name], after[name]) for name in before}
    return Shapes(plan, columns[Way.STOCK], columns[Way.DEVCONV], shapes)


def _outputs(model: torch.nn.Module, task: Task, device: torch.device) -> dict[str, tuple[int, ...]]:
    with torch.no_grad():
        output = model(**{name: tensor.to(device) for name, tensor in task.batch.items()})
    return {name: tuple(output[name].shape) for name in ("logits", "loss")}
