"""The demo's table: every figure in its place, what is off the CPU marked, and within 80 columns."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from devconv.cli.comparison import compare
from devconv.cli.training import Census
from tests.cli.columns import FALLING, cpu, ours, stock

pytestmark = pytest.mark.lane("cpu")

COLUMNS = [cpu(), stock([10.0] * 4, Census(parameters=108, in_optimizer=0, tied=0)), ours()]


def shown(columns, width=80, *, styled=False):
    out = io.StringIO()
    colours = "truecolor" if styled else None
    Console(file=out, width=width, force_terminal=styled, color_system=colours, highlight=False).print(compare(columns))
    return out.getvalue().splitlines()


def cells(columns, name):
    (line,) = [line for line in shown(columns) if name in line]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_table_stays_within_80_columns():
    assert max(map(len, shown(COLUMNS))) <= 80


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("parameters  ", ["106", "106 -> 108", "106"]),
        ("of them in the optimizer", ["106", "106 -> 0", "106"]),
        ("tied tensors", ["2", "2 -> 0", "2"]),
        ("loss, step 4", ["4.0000", "10.0000", "4.0000"]),
        ("off the CPU, relative", ["-", "1.5e+00", "0.0e+00"]),
    ],
)
def test_row_shows_the_figures_of_all_columns(name, expected):
    assert cells(COLUMNS, name) == expected


def test_routes_and_bytes_are_those_of_the_column():
    column = ours()
    column.routes, column.bytes = {"parameter": {"swap": 9, "keep": 2}}, 90_978_024

    assert cells([cpu(), stock(), column], "parameters moved by") == ["-", "-", "9 swap, 2 keep"]
    assert cells([cpu(), stock(), column], "buffers moved by") == ["-", "-", "-"]
    assert cells([cpu(), stock(), column], "bytes moved") == ["-", "0 B", "91.0 MB"]


@pytest.mark.parametrize(
    ("figure", "marked"), [("106 -> 108", True), ("1.5e+00", True), ("10.0000", True), ("0.0e+00", False)]
)
def test_what_is_off_the_cpu_is_marked(figure, marked):
    text = "\n".join(shown(COLUMNS, styled=True))

    assert bool(re.search(rf"\x1b\[1;31m *{re.escape(figure)}", text)) is marked


def test_a_step_that_was_never_reached_is_an_error():
    assert cells([cpu(), stock(FALLING[:1], error="RuntimeError: no"), ours()], "loss, step 2") == [
        "8.0000",
        "error",
        "8.0000",
    ]


def test_a_model_that_never_arrived_has_no_count():
    assert cells([cpu(), stock([], None, "RuntimeError: no"), ours()], "parameters  ")[1] == "106 -> ?"


def test_many_steps_are_thinned_and_keep_the_first_and_the_last():
    losses = [100.0 - step for step in range(60)]
    rows = [line for line in shown([cpu(losses), stock(losses), ours(losses)]) if "loss, step" in line]

    assert len(rows) == 12
    assert "loss, step 1 " in rows[0]
    assert "loss, step 60" in rows[-1]
