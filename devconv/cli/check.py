"""``devconv check``: does a device keep devconv's promises?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from devconv.conformance import GROUPS, ManifestError, Outcome, catalogue, run, to_json, to_junit, to_markdown, to_text

__all__ = ["check"]

_NOT_HERE = 3


def check(
    device_type: Annotated[str, typer.Argument(metavar="TYPE", help="the device type, such as acme")] = "",
    report: Annotated[Path | None, typer.Option(help="write a page in Markdown")] = None,
    junit: Annotated[Path | None, typer.Option(help="write JUnit XML, for CI")] = None,
    json: Annotated[Path | None, typer.Option(help="write everything as JSON")] = None,
    group: Annotated[list[str] | None, typer.Option(help="only this group of checks; can be repeated")] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="declared gaps (default: conformance.toml beside the backend)")
    ] = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="module to import first, such as one that registers a backend")
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds after which a check counts as hung")] = 60.0,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="examine the backend on torch's own lazy device in place of its own")
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="list the checks and run nothing")] = False,
    quiet: Annotated[bool, typer.Option(help="print the summary only")] = False,
) -> None:
    """Run devconv's promises on a device. Each check runs in a process that it may abort or hang.

    Exit status: 0 if every promise is kept or declared as a gap, 1 if not, 2 for wrong usage, 3 if the device is not
    here.
    """
    unknown = sorted(set(group or ()) - set(GROUPS))
    if unknown:
        raise typer.BadParameter(f"no such group: {', '.join(unknown)} (groups: {', '.join(GROUPS)})")
    chosen = [each for each in catalogue() if not group or each.group in group]
    if names:
        for each in chosen:
            print(f"{each.id:<75} {each.promise}")
        return
    if not device_type:
        raise typer.BadParameter("name the device type to examine, such as acme")
    try:
        result = run(
            device_type,
            checks=chosen,
            manifest=manifest,
            imports=imports or (),
            timeout=timeout,
            stand_in=stand_in,
            on_outcome=None if quiet else _say,
        )
    except (ManifestError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    for path, render in ((report, to_markdown), (junit, to_junit), (json, to_json)):
        if path is not None:
            path.write_text(render(result), encoding="utf-8")
    print(to_text(result))
    if result.facts.get("missing"):
        raise typer.Exit(_NOT_HERE)
    raise typer.Exit(0 if result.ok else 1)


def _say(outcome: Outcome) -> None:
    print(f"{outcome.status.value:<15} {outcome.check.id}", flush=True)
