"""Where commands write: results to standard output, everything else to standard error."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

__all__ = ["UNUSABLE", "stderr", "stdout", "stop"]

UNUSABLE = 2
"""Exit status where a command could not start: wrong usage, a missing package, a device that is not here."""


def stdout() -> Console:
    """The console for results, as wide as the terminal or ``COLUMNS``."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """The console for progress and errors; what a program reads from standard output stays clean."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def stop(message: str, status: int = UNUSABLE) -> NoReturn:
    """End the command with a message and an exit status."""
    stderr().print(f"devconv: {message}", soft_wrap=True)
    raise typer.Exit(status)
