"""How a column of the demo is called and drawn, alike in the table, the terminal and the picture."""

from __future__ import annotations

from .training import Column, Way

__all__ = ["COLOURS", "MARKS", "STYLES", "amount", "titled"]

COLOURS = {Way.CPU: "#8c8c8c", Way.STOCK: "#d55e00", Way.DEVCONV: "#0072b2"}
"""Grey, and two colours of Okabe and Ito's palette, which people who are colour-blind can tell apart."""

STYLES = {Way.CPU: "", Way.STOCK: "#d55e00", Way.DEVCONV: "#56b4e9"}
"""The same on a terminal, whose background may be dark."""

MARKS = {Way.CPU: "", Way.STOCK: "■", Way.DEVCONV: "●"}


def titled(column: Column) -> str:
    """A column's name, such as ``"stock torch, xla:0"``."""
    names = {Way.CPU: "CPU", Way.STOCK: f"{column.device}, stock torch", Way.DEVCONV: f"{column.device}, devconv"}
    return names[column.way]


def amount(count: int) -> str:
    """A number of bytes as people read it.

    >>> amount(0), amount(8192), amount(90_978_024)
    ('0 B', '8.2 kB', '91.0 MB')
    """
    for unit, factor in (("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
