"""Writes docs/promises.md: every promise, kept or lost, by devconv and by stock torch, on every lane.

The page comes from the tests themselves: tests/invariants is run through devconv's two doors and against stock torch's
three behaviours (default, overwrite, swap), each test file in a process of its own, since some of stock torch's
conversions abort it. ``python ci/promises.py run LANE FILE`` runs one lane in the interpreter that calls it and writes
the outcomes as JSON; ``python ci/promises.py write FILE...`` turns those of all lanes into the page.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INVARIANTS = ROOT / "tests" / "invariants"
PAGE = ROOT / "docs" / "promises.md"

MODES = {
    "devconv": ("flag", "convert"),
    "stock default": ("stock",),
    "stock overwrite": ("stock-overwrite",),
    "stock swap": ("stock-swap",),
}
"""Column of the page -> modes of tests/invariants/conftest.py."""

OUTCOMES = ("kept", "refused", "lost silently", "breaks later", "half moved", "crashed")
BROKEN = ("lost silently", "breaks later", "half moved", "crashed")

INTRODUCTION = """\
# Promises

Written by `nox -s promises` from tests/invariants; do not edit. Each line is a test, and its name is the promise. A cell
counts the conversions of the lane (tests/moves.py lists them) by how the test ended:

- **kept**: the test passed;
- **refused**: an error before anything was changed;
- **lost silently**: no error, and the promise is broken;
- **breaks later**: no error from the conversion, but one from the next thing that the program does;
- **half moved**: an error from the conversion, and part of the model is converted;
- **crashed**: the process aborted or hung;
- *n/a*: not applicable, such as values on `meta`.

devconv is counted through both of its doors, the flag and `devconv.convert`, and also under torch's own two conversion
flags. What devconv does not promise is on [the page of limits](limits.md).
"""


def run(lane: str, out: Path, limit: float = 1800) -> None:
    """Run every test file in every mode and write the outcomes, one JSON object a line.

    Args:
        lane: name of a row of ``ci.lanes.LANES``, for the tests' environment.
        out: the file to write.
        limit: seconds for one file in one mode before it counts as hung.
    """
    from ci.lanes import LANES

    environment = os.environ | dict(LANES[lane].variables) | {"DEVCONV_LANE": lane}
    out.write_text("")
    jobs = [(column, file) for column in MODES for file in sorted(INVARIANTS.glob("test_*.py"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(lambda job: _run_file(job[1], MODES[job[0]], environment, limit), jobs)
        for (column, file), records in zip(jobs, outcomes, strict=True):
            counted = Counter(record["outcome"] for record in records)
            print(f"{lane}: {column}: {file.stem}: {dict(counted)}", flush=True)
            with out.open("a") as stream:
                stream.writelines(json.dumps(record | {"lane": lane, "column": column}) + "\n" for record in records)


def _run_file(file: Path, modes: Iterable[str], environment: Mapping[str, str], limit: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes"
        path.touch()
        variables = {
            **environment,
            "DEVCONV_PROMISES_MODE": ",".join(modes),
            "DEVCONV_PROMISES_FILE": str(path),
        }
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", str(file)]
        while True:
            before = len(_records(path))
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=variables, capture_output=True, timeout=limit, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
            records = _records(path)
            # Tests that were recorded are not run again, so after a crash the next run goes on behind it.
            if code in (0, 1, 5) or len(records) == before:
                return records


def _records(path: Path) -> list[dict[str, Any]]:
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        last[record["test"], record["case"]] = record
    return list(last.values())


def write(files: Iterable[Path], page: Path = PAGE) -> list[str]:
    """Write the page from the outcomes of all lanes.

    Returns:
        The tests that devconv did not keep or refuse; empty when all is well.
    """
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    sections = [INTRODUCTION, "## Summary\n", _summary(records)]
    for lane in _ordered(record["lane"] for record in records):
        sections += [f"## Lane {lane}\n", *_lane(lane, [record for record in records if record["lane"] == lane])]
    page.write_text("\n".join(sections))
    return sorted(
        {
            f"{record['lane']}: {record['test']}[{record['case']}]: {record['outcome']}"
            for record in records
            if record["column"] == "devconv" and record["outcome"] in BROKEN
        }
    )


def _ordered(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _summary(records: list[dict[str, Any]]) -> str:
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        counts[record["lane"], record["column"]][record["outcome"]] += 1
    lines = [f"| lane | mode | {' | '.join(OUTCOMES)} | n/a |", "|---|---|" + "---:|" * (len(OUTCOMES) + 1)]
    for (lane, column), counted in counts.items():
        numbers = [str(counted[outcome]) for outcome in (*OUTCOMES, "not applicable")]
        lines.append(f"| {lane} | {column} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def _lane(lane: str, records: list[dict[str, Any]]) -> Iterable[str]:
    cells: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        cells[record["promise"], record["test"], record["column"]][record["outcome"]] += 1
    for promise in sorted({record["promise"] for record in records}):
        tests = _ordered(record["test"] for record in records if record["promise"] == promise)
        lines = [f"### {lane}: {promise.replace('_', ' ')}\n", promise_of(promise), ""]
        lines += [f"| | {' | '.join(MODES)} |", "|---|" + "---|" * len(MODES)]
        for test in tests:
            row = (cell(cells[promise, test, column]) for column in MODES)
            lines.append(f"| {test.removeprefix('test_').replace('_', ' ')} | {' | '.join(row)} |")
        yield "\n".join(lines) + "\n"


def cell(counted: Counter[str]) -> str:
    """One cell of the table.

    >>> cell(Counter({"kept": 3, "not applicable": 2}))
    'kept 3'
    >>> cell(Counter({"lost silently": 1, "kept": 2}))
    'kept 2, **lost silently 1**'
    >>> cell(Counter())
    '*n/a*'
    """
    parts = [
        f"**{outcome} {counted[outcome]}**" if outcome in BROKEN else f"{outcome} {counted[outcome]}"
        for outcome in OUTCOMES
        if counted[outcome]
    ]
    return ", ".join(parts) or "*n/a*"


def promise_of(name: str) -> str:
    """The promise of a test file, in its own words: the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse((INVARIANTS / f"test_{name}.py").read_text())) or ""
    first = re.split(r"\n\s*\n", text)[0]
    promise = " ".join(first.split()).removeprefix("Promise: ")
    return promise[:1].upper() + promise[1:]


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status."""
    sys.path.insert(0, str(ROOT))
    match arguments:
        case ["run", lane, out]:
            run(lane, Path(out))
            return 0
        case ["write", *files] if files:
            broken = write([Path(file) for file in files])
            print(f"{PAGE.relative_to(ROOT)}: {len(broken)} promises that devconv does not keep", *broken, sep="\n  ")
            return 1 if broken else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
