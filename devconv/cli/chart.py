"""The loss curves on the terminal: lines of braille dots, eight to a character, with marks on the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from .series import MARKS, STYLES, titled
from .training import Column

__all__ = ["draw"]

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character: four rows of two dots."""

_LABELS = 7
"""Characters for the labels of the vertical axis."""


@dataclass(frozen=True)
class _Scale:
    """From steps and losses to dots; dot (0, 0) is at the top left."""

    steps: int
    low: float
    high: float
    width: int
    height: int

    def x(self, step: float) -> int:
        return round(step * (self.width - 1) / max(self.steps - 1, 1))

    def y(self, loss: float) -> int:
        return round((self.high - loss) * (self.height - 1) / ((self.high - self.low) or 1.0))


def draw(columns: Sequence[Column], width: int, height: int = 12) -> Text:
    """The losses of all columns, as text with a legend.

    Columns are drawn in their order, so that a later one's marks lie on an earlier one's line.

    Args:
        columns: with at least one loss among them.
        width: characters of the whole chart.
        height: lines of the plotted area.
    """
    losses = [loss for column in columns for loss in column.losses]
    plot = min(width, 100) - _LABELS - 2
    scale = _Scale(max(len(column.losses) for column in columns), min(losses), max(losses), 2 * plot, 4 * height)
    cells: dict[tuple[int, int], tuple[str, str]] = {}
    for column in columns:
        cells |= _line(column, scale)
    for column in columns:
        if mark := MARKS[column.way]:
            for step, loss in enumerate(column.losses):
                cells[scale.y(loss) // 4, scale.x(step) // 2] = (mark, STYLES[column.way])
    text = Text("loss\n", no_wrap=True)
    for row in range(height):
        text.append(
            f"{_label(row, height, scale):>{_LABELS}} ┤" if row % 3 == 0 or row == height - 1 else " " * 8 + "│"
        )
        for place in range(plot):
            character, style = cells.get((row, place), (" ", ""))
            text.append(character, style=style)
        text.append("\n")
    text.append(" " * (_LABELS + 1) + "└" + "─" * plot + "\n")
    text.append(_steps(scale, plot))
    return text.append(_legend(columns))


def _line(column: Column, scale: _Scale) -> dict[tuple[int, int], tuple[str, str]]:
    bits: dict[tuple[int, int], int] = {}
    previous: int | None = None
    for x in range(scale.width):
        position = x * (scale.steps - 1) / max(scale.width - 1, 1)
        left = int(position)
        if left >= len(column.losses):
            break
        right = min(left + 1, len(column.losses) - 1)
        if right == left and position > left:
            break
        loss = column.losses[left] + (position - left) * (column.losses[right] - column.losses[left])
        y = scale.y(loss)
        # A steep line passes several dots in one column of dots.
        for passed in range(min(y, previous + 1 if previous is not None and previous < y else y), y + 1):
            cell = (passed // 4, x // 2)
            bits[cell] = bits.get(cell, 0) | _DOTS[passed % 4][x % 2]
        previous = y
    return {cell: (chr(_BRAILLE | value), STYLES[column.way]) for cell, value in bits.items()}


def _label(row: int, height: int, scale: _Scale) -> str:
    # A label names the middle of its line of characters.
    share = min(max((4 * row + 1.5) / (4 * height - 1), 0.0), 1.0)
    return f"{scale.high - share * (scale.high - scale.low):.1f}"


def _steps(scale: _Scale, plot: int) -> str:
    line = [" "] * (_LABELS + 2 + plot + 4)
    free = 0
    for step in range(scale.steps):
        label = str(step + 1)
        start = _LABELS + 2 + scale.x(step) // 2 - len(label) // 2
        if start >= free:
            line[start : start + len(label)] = label
            free = start + len(label) + 2
    return " " * 4 + "step" + "".join(line)[8:].rstrip() + "\n"


def _legend(columns: Sequence[Column]) -> Text:
    text = Text(" " * (_LABELS + 2))
    for column in columns:
        text.append(MARKS[column.way] or "⠤⠤", style=STYLES[column.way])
        text.append(f" {titled(column)}    ")
    text.rstrip()
    return text
