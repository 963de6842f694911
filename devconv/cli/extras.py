"""Packages that only some commands need: looked for before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from .screen import stop

__all__ = ["need"]


def need(packages: Sequence[str], extra: str, advice: str = "") -> None:
    """End the command, with the line that installs them, unless all `packages` can be imported.

    Args:
        packages: names that are imported.
        extra: the extra of devconv that brings them.
        advice: what else the caller could do.
    """
    missing = [package for package in packages if not _installed(package)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        stop(f'{", ".join(missing)} {are} not installed. Run: pip install "devconv[{extra}]"{advice}')


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module that is set to None in sys.modules, or has no spec
        return False
