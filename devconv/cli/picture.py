"""The loss curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .series import COLOURS, titled
from .training import Column, Way
from .verdict import TOLERANCE, farthest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["paint"]

_INK, _PALE = "#333333", "#d9d9d9"


def paint(columns: Sequence[Column], path: Path) -> None:
    """Write the losses of all columns to a picture file; the ending of `path` says which kind.

    The CPU's curve is wide and pale with devconv's on it, because the two are the same to the eye.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib knows no such kind of picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    drawn = {
        Way.CPU: {"linewidth": 7, "solid_capstyle": "round", "alpha": 0.45},
        Way.STOCK: {"linewidth": 2, "linestyle": (0, (5, 2)), "marker": "s", "markersize": 6},
        Way.DEVCONV: {"linewidth": 2, "marker": "o", "markersize": 6},
    }
    for column in columns:
        steps = range(1, len(column.losses) + 1)
        axes.plot(steps, column.losses, color=COLOURS[column.way], label=titled(column), **drawn[column.way])  # type: ignore[arg-type]
    cpu = columns[0]
    axes.set_title(
        "MiniLM as a masked language model, AdamW built before the move", color=_INK, loc="left", fontsize=12
    )
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss (cross-entropy of the masked words)", color=_INK)
    axes.set_xlim(0.7, len(cpu.losses) + 0.3)
    axes.set_ylim(0, 1.12 * max(loss for column in columns for loss in column.losses))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=_PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_PALE)
    axes.tick_params(colors=_INK)
    for column in columns:
        _explain(axes, column, cpu)
    axes.legend(frameon=False, labelcolor=_INK, loc="center right")
    figure.savefig(path)


def _explain(axes: Axes, column: Column, cpu: Column) -> None:
    """A word above a curve, where it says something that the legend does not."""
    distance = farthest(column.losses, cpu.losses)
    last = len(column.losses) - 1
    if column.way is Way.CPU or column.after is None or last < 0:
        return
    counted = f"{column.before.parameters} -> {column.after.parameters} parameters"
    if column.way is Way.STOCK and distance > TOLERANCE:
        said = f"{counted}, {column.after.in_optimizer} of them in the optimizer"
        place, side = last, "right"
    elif column.way is Way.DEVCONV:
        # From the middle to the right: a falling curve leaves that place free.
        said, place, side = f"{counted},\nwithin {distance:.0e} of the CPU", last // 2, "left"
    else:
        return
    axes.annotate(
        said,
        (place + 1, column.losses[place]),
        (0, 10),
        textcoords="offset points",
        horizontalalignment=side,
        color=COLOURS[column.way],
    )
