"""Runs every promise for every conversion of the lane, through both doors; or against stock torch, for the record.

``DEVCONV_PROMISES_MODE`` picks the modes (default: devconv's two doors). With ``DEVCONV_PROMISES_FILE`` each outcome is
written there as a line of JSON, and tests that have one there are not run again; `nox -s promises` sets both and turns
the lines into docs/promises.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import devconv
from tests.moves import CONVERSIONS, DEVCONV_MODES, STOCK_APPLY, Conversion, Move, device_is_here

MODES = tuple(filter(None, os.environ.get("DEVCONV_PROMISES_MODE", "").split(",")))
RECORD = os.environ.get("DEVCONV_PROMISES_FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conversions(where): run a promise for the conversions that `where` picks")


def modes_of(conversion: Conversion) -> tuple[str, ...]:
    """The modes that a conversion is tried in.

    Both doors lead to one driver. Where XLA compiles, or compiled once already, each conversion but the most important
    one takes one door, in turn: that keeps the lane to minutes. ``DEVCONV_PROMISES_MODE=flag,convert`` takes all.
    """
    if MODES:
        return MODES
    if not device_is_here("xla") or conversion.name == "cpu-xla:0":
        return DEVCONV_MODES
    return (DEVCONV_MODES[CONVERSIONS.index(conversion) % 2],)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "move" not in metafunc.fixturenames:
        return
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("conversions")]
    metafunc.parametrize(
        "move",
        [
            pytest.param((conversion, mode), id=f"{conversion.name}-{mode}")
            for conversion in CONVERSIONS
            for mode in modes_of(conversion)
            if conversion.available
            and all(where(conversion) for where in chosen)
            # torch's two future flags are devconv's routes on one side and modes of their own on the other.
            and (mode in DEVCONV_MODES or not conversion.future)
        ],
        indirect=True,
    )


# Every optimizer compiles programs of its own on XLA, a second or more each: a plain run takes those that nearly
# everybody uses, through one door. `nox -s models` sets DEVCONV_EVERY_OPTIMIZER and takes all.
EVERYDAY = ("sgd-momentum", "adam", "adamw-foreach", "adagrad", "lbfgs")


def _is_long(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if "move" not in parameters or "name" not in parameters or "test_optimizers" not in item.nodeid:
        return False
    conversion, mode = parameters["move"]
    return conversion.needs == "xla" and (parameters["name"] not in EVERYDAY or mode == "convert")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("DEVCONV_EVERY_OPTIMIZER") and RECORD is None:
        long = [item for item in items if _is_long(item)]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    if RECORD is None:
        return
    with Path(RECORD).open(encoding="utf-8") as file:
        done = {(line["test"], line["case"]) for line in map(json.loads, file)}
    # Tests that do not go by `move` say nothing about stock torch.
    ours = [item for item in items if _is_counted(item) and (item.originalname, item.callspec.id) not in done]  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours


def _is_counted(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and isinstance(item.callspec.params.get("move"), tuple)


@pytest.fixture
def move(request: pytest.FixtureRequest) -> Iterator[Move]:
    conversion: Conversion
    conversion, mode = request.param
    if mode in DEVCONV_MODES:
        for hop in conversion.hops:
            # Before the first backward of the process, as a program would.
            devconv.prepare(hop.device or conversion.source)
        devconv.prepare(conversion.source)
    yield Move(conversion, mode)
    assert nn.Module._apply is STOCK_APPLY, "the conversion left its hook installed"


def pytest_runtest_setup(item: pytest.Item) -> None:
    _record(item, "crashed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "call" or (call.when == "setup" and call.excinfo is not None):
        _record(item, _outcome(item, call))
    return report


def _outcome(item: pytest.Item, call: pytest.CallInfo[None]) -> str:
    move = getattr(item, "funcargs", {}).get("move")
    if call.excinfo is None:
        return "refused" if move is not None and move.refusal_is_kept else "kept"
    if call.excinfo.errisinstance(pytest.skip.Exception):
        return "not applicable"
    if move is not None and move.failed is not None:
        return "refused" if move.failed == "untouched" else "half moved"
    lost = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
    return "lost silently" if lost else "breaks later"


def _record(item: pytest.Item, outcome: str) -> None:
    """One line per test; the last line of a test counts, so one that kills the process stays "crashed"."""
    if RECORD is None or not _is_counted(item):
        return
    conversion, mode = item.callspec.params["move"]
    line = {
        "promise": item.path.stem.removeprefix("test_"),
        "test": item.originalname,  # type: ignore[attr-defined]
        "case": item.callspec.id,
        "conversion": conversion.name,
        "mode": mode,
        "outcome": outcome,
    }
    with Path(RECORD).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
