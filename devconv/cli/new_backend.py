"""``devconv new-backend``: start the package of a device's vendor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from devconv.conformance import SkeletonError, write_skeleton

__all__ = ["new_backend"]


def new_backend(
    device_type: Annotated[str, typer.Argument(metavar="TYPE", help="the device type, such as acme")],
    folder: Annotated[Path, typer.Option(help="where to make devconv-TYPE")] = Path(),
) -> None:
    """Write a package with a backend, its metadata and its tests, which pass on torch's own stand-in for a device."""
    try:
        written = write_skeleton(device_type, folder)
    except SkeletonError as error:
        raise typer.BadParameter(str(error)) from error
    for path in written:
        print(path)
    print(f"\nNext:\n  cd {folder / f'devconv-{device_type}'}\n  pip install -e '.[test]'\n  pytest")
