"""``devconv backends``: which devices have a backend, and which of them are here."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

import devconv

from .screen import stderr, stdout, stop

__all__ = ["backends"]

_STATUSES = {"there": "available", "missing": "missing hardware", "broken": "broken"}
_STYLES = {"loaded": "green", "available": "green", "missing hardware": "yellow", "broken": "red"}


@dataclass(frozen=True)
class _Line:
    device_type: str
    origin: str
    status: str
    devices: int
    why: str = ""
    cure: str = ""


def backends(
    types: Annotated[list[str] | None, typer.Argument(metavar="[TYPE]...", help="only these device types")] = None,
    json: Annotated[bool, typer.Option("--json", help="print a JSON list and nothing else")] = False,
    timeout: Annotated[float, typer.Option(help="seconds after which a backend counts as hanging", min=1)] = 60.0,
) -> None:
    """List the backends: device type, package, status and number of devices.

    Each backend is loaded in a process of its own, so one that aborts or hangs spoils its own line only.
    """
    found = {registration.device_type: registration for registration in devconv.registrations()}
    if unknown := sorted(set(types or ()) - set(found)):
        stop(f"no backend serves {', '.join(unknown)} (known: {', '.join(found)})")
    chosen = [found[name] for name in found if not types or name in types]
    with stderr().status(f"asking {len(chosen)} backends"), ThreadPoolExecutor(os.cpu_count()) as pool:
        lines = list(pool.map(lambda each: _ask(each.device_type, each.origin, each.status, timeout), chosen))
    if json:
        print(json_format.dumps([asdict(line) for line in lines], indent=2))
    else:
        _show(lines)


def _ask(device_type: str, origin: str, status: str, timeout: float) -> _Line:
    presence = devconv.probe(device_type, timeout=timeout)
    if status != "loaded" or presence.state != "there":
        status = _STATUSES[presence.state]
    return _Line(device_type, origin, status, presence.devices, presence.why, presence.cure)


def _show(lines: Sequence[_Line]) -> None:
    table = Table()
    table.add_column("device type", no_wrap=True)
    table.add_column("from", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("devices", justify="right", no_wrap=True)
    for line in lines:
        status = Text(line.status, style=_STYLES.get(line.status, ""))
        table.add_row(line.device_type, line.origin, status, str(line.devices) if line.devices else "-")
    screen = stdout()
    screen.print(table)
    for line in lines:
        if line.why:
            screen.print(f"{line.device_type}: {line.why.rstrip('.')}. {line.cure}".rstrip())
