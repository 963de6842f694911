"""The demo's table: the three columns side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from .series import STYLES, amount, titled
from .training import Column, Way
from .verdict import TOLERANCE, farthest

__all__ = ["compare"]

_LOSSES_SHOWN = 12
_NOTHING = "-"


def compare(columns: Sequence[Column]) -> Table:
    """A table with a column for each way and a row for each figure.

    Args:
        columns: the CPU's first; what is off it is marked.
    """
    cpu = columns[0]
    table = Table(padding=(0, 1))
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(Text(titled(column), style=STYLES[column.way]), justify="right")

    def row(name: str, cell: Callable[[Column], Text | str], *, last: bool = False) -> None:
        table.add_row(name, *(cell(column) for column in columns), end_section=last)

    row("parameters", lambda each: _change(each, "parameters"))
    row("of them in the optimizer", lambda each: _change(each, "in_optimizer"))
    row("tied tensors", lambda each: _change(each, "tied"), last=True)
    row("parameters moved by", lambda each: _routes(each, "parameter"))
    row("buffers moved by", lambda each: _routes(each, "buffer"))
    row("bytes moved", lambda each: _NOTHING if each.way is Way.CPU else amount(each.bytes), last=True)
    steps = _shown(len(cpu.losses))
    for step in steps:
        row(f"loss, step {step + 1}", lambda each, step=step: _loss(each, cpu, step), last=step == steps[-1])  # type: ignore[misc]
    row("off the CPU, relative", lambda each: _distance(each, cpu))
    row("seconds, with compiling", lambda each: f"{each.seconds:.1f}")
    return table


def _wrong(text: str) -> Text:
    return Text(text, style="bold red")


def _change(column: Column, figure: str) -> Text | str:
    before: int = getattr(column.before, figure)
    if column.after is None:
        return _wrong(f"{before} -> ?")
    after: int = getattr(column.after, figure)
    return str(before) if after == before else _wrong(f"{before} -> {after}")


def _routes(column: Column, kind: str) -> str:
    routes = column.routes.get(kind)
    return ", ".join(f"{number} {route}" for route, number in routes.items()) if routes else _NOTHING


def _shown(steps: int) -> list[int]:
    """The first, the last and evenly spaced steps between them.

    >>> _shown(3), _shown(100)
    ([0, 1, 2], [0, 9, 18, 27, 36, 45, 54, 63, 72, 81, 90, 99])
    """
    if steps <= _LOSSES_SHOWN:
        return list(range(steps))
    return [index * (steps - 1) // (_LOSSES_SHOWN - 1) for index in range(_LOSSES_SHOWN)]


def _loss(column: Column, cpu: Column, step: int) -> Text | str:
    if step >= len(column.losses):
        return _wrong("error")
    text = f"{column.losses[step]:.4f}"
    same = farthest(column.losses[step : step + 1], cpu.losses[step : step + 1]) <= TOLERANCE
    return text if same else _wrong(text)


def _distance(column: Column, cpu: Column) -> Text | str:
    if column.way is Way.CPU:
        return _NOTHING
    distance = farthest(column.losses, cpu.losses)
    return f"{distance:.1e}" if distance <= TOLERANCE else _wrong(f"{distance:.1e}")
