"""The sub-commands, each of them a function in a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

import devconv

from .backends import backends
from .check import check
from .demo import demo
from .new_backend import new_backend

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
app.command()(demo)
app.command()(backends)
app.command()(check)
app.command("new-backend")(new_backend)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"devconv {devconv.__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Move a model to any device or dtype whole, or not at all."""
