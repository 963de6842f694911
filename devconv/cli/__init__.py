"""The command ``devconv``: one file for each sub-command, registered in `application`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of the process."""
    from .application import app

    app(prog_name="devconv")
