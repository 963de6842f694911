"""What a conversion will do or did: one `Item` for each tensor, one renderer for plans and reports, as table or JSON.

Nothing here holds a tensor or a module, so a report that is kept keeps no model alive.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import Refusal
from .policy import Route

__all__ = ["Item", "Report", "Rows", "Summary", "render"]


@dataclass(frozen=True)
class Item:
    """One distinct tensor of the model.

    Attributes:
        names: its full names, as in ``named_parameters()``; more than one for a tied tensor.
        kind: ``"parameter"``, ``"buffer"``, ``"grad"`` or ``"lazy"``.
        route: the way it is converted.
        source: device and dtype before, as ``"cpu float32"``.
        target: device and dtype after.
        bytes: size on the target, in bytes; 0 for a lazy tensor.
        note: what else there is to say of it.
    """

    names: tuple[str, ...]
    kind: str
    route: Route
    source: str
    target: str
    bytes: int
    note: str = ""


Rows = Callable[[], Iterable[Item]]
"""Makes the items when they are first asked for: a conversion of thousands of tensors needs none."""


class Summary:
    """Items and their totals; what plans and reports have in common."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """One item for each distinct tensor, in the order of the walk."""
        return tuple(self._rows())

    @property
    def routes(self) -> Counter[Route]:
        """Number of tensors by route."""
        return Counter(item.route for item in self.items)

    @property
    def bytes(self) -> int:
        """Bytes that arrive on the target: all tensors but those that are kept."""
        return sum(item.bytes for item in self.items if item.route is not Route.KEEP)

    @property
    def ties(self) -> int:
        """Number of tensors that stand under more than one name, gradients not counted."""
        return sum(len(item.names) > 1 and item.kind != "grad" for item in self.items)


class Report(Summary):
    """What a conversion did.

    Attributes:
        what: the conversion, as ``"xla:0"`` or ``"torch.float64"``.
        seconds: wall-clock time of the whole conversion.
        holders: number of tensors that a live graph, or something else in C++, still referred to.
        ghosts: number of replaced tensors that a live graph keeps, and whose gradients are delivered to the parameter.
        notes: what the caller should know, one sentence each.
    """

    def __init__(
        self,
        rows: Rows,
        what: str,
        *,
        seconds: float = 0.0,
        holders: int = 0,
        ghosts: int = 0,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(rows)
        self.what = what
        self.seconds = seconds
        self.holders = holders
        self.ghosts = ghosts
        self.notes = tuple(notes)

    def to_json(self) -> str:
        """The report as a JSON object, with every item."""
        return json.dumps(
            {
                "what": self.what,
                "seconds": self.seconds,
                "bytes": self.bytes,
                "routes": {str(route): number for route, number in self.routes.items()},
                "ties": self.ties,
                "holders": self.holders,
                "ghosts": self.ghosts,
                "notes": list(self.notes),
                "items": [as_dict(item) for item in self.items],
            }
        )

    def __str__(self) -> str:
        facts = [f"{self.seconds * 1e3:.1f} ms"]
        if self.holders:
            facts.append(f"{self.holders} held by live graphs")
        if self.ghosts:
            facts.append(f"{self.ghosts} ghosts")
        return render(f"converted to {self.what}", self, facts, self.notes, ())

    def __repr__(self) -> str:
        routes = ", ".join(f"{number} {route}" for route, number in self.routes.items()) or "nothing"
        return f"<devconv.Report to {self.what}: {routes}; {size(self.bytes)} in {self.seconds * 1e3:.1f} ms>"


def as_dict(item: Item) -> dict[str, Any]:
    return {
        "names": list(item.names),
        "kind": item.kind,
        "route": str(item.route),
        "source": item.source,
        "target": item.target,
        "bytes": item.bytes,
        "note": item.note,
    }


def size(count: float) -> str:
    """A number of bytes as people read it.

    >>> size(0), size(1536), size(90_000_000)
    ('0 B', '1.5 kB', '90.0 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


SHOWN = 40
"""Rows that a table shows; a model has thousands, and `items` has them all."""


def render(
    title: str,
    summary: Summary,
    facts: Sequence[str],
    notes: Sequence[str],
    refusals: Sequence[Refusal],
    width: int = 120,
) -> str:
    """A table of tensor, route, devices and bytes, with totals below, as plain text.

    Args:
        title: what the table shows.
        summary: the items.
        facts: short figures for the line of totals.
        notes: sentences for below the table.
        refusals: reasons why the conversion is refused; shown first.
        width: columns of the text.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", expand=False)
    for heading, justify in (("tensor", "left"), ("kind", "left"), ("route", "left"), ("from", "left"), ("to", "left")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("bytes", justify="right")
    items = summary.items
    for item in items[:SHOWN]:
        name = " = ".join(item.names) + (f"  ({item.note})" if item.note else "")
        table.add_row(name, item.kind, str(item.route), item.source, item.target, size(item.bytes))
    if len(items) > SHOWN:
        table.add_row(f"... and {len(items) - SHOWN} more", "", "", "", "", "")
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False)
    for refusal in refusals[:SHOWN]:
        console.print(f"refused: {refusal}")
    console.print(table)
    routes = ", ".join(f"{number} {route}" for route, number in summary.routes.items()) or "nothing to do"
    tied = f"{summary.ties} tied" if summary.ties else ""
    console.print("; ".join(part for part in (routes, tied, size(summary.bytes), *facts) if part))
    for note in notes:
        console.print(f"note: {note}")
    return out.getvalue().rstrip("\n")
