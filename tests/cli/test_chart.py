"""The curves on the terminal: within the width, each step marked, and where it should be."""

from __future__ import annotations

import pytest

from devconv.cli.chart import draw
from tests.cli.columns import FALLING, cpu, ours, stock

pytestmark = pytest.mark.lane("cpu")

FLAT = [10.0] * 4
HEIGHT = 12


def lines(columns, width=80):
    """The lines of the plotted area, from the axis on."""
    text = draw(columns, width, HEIGHT).plain.splitlines()
    return [line[9:] for line in text[1 : 1 + HEIGHT]]


def marks(columns, mark):
    """Row and place of every mark."""
    return [(row, place) for row, line in enumerate(lines(columns)) for place, char in enumerate(line) if char == mark]


@pytest.mark.parametrize("width", [80, 120, 300])
@pytest.mark.parametrize("steps", [1, 2, 4, 8, 60])
def test_chart_stays_within_the_terminal(width, steps):
    losses = [10.0 - step / 10 for step in range(steps)]
    text = draw([cpu(losses), stock([10.0] * steps), ours(losses)], width).plain

    assert max(map(len, text.splitlines())) <= width


def test_every_step_has_its_mark_and_the_flat_curve_stays_in_one_line():
    columns = [cpu(), stock(FLAT), ours()]

    flat, falling = marks(columns, "■"), marks(columns, "●")

    # devconv is drawn last, so its first mark hides stock torch's.
    assert len(falling) == len(FALLING)
    assert len(flat) == len(FLAT) - 1
    assert {row for row, _ in flat} == {0}
    assert [row for row, _ in falling] == sorted(row for row, _ in falling)
    assert falling[-1][0] == HEIGHT - 1
    assert {place for _, place in flat} < {place for _, place in falling}


def test_marks_of_devconv_lie_on_the_line_of_the_cpu():
    line = lines([cpu()])
    on_it = [line[row][place] != " " for row, place in marks([ours()], "●")]

    assert on_it == [True] * len(FALLING)


@pytest.mark.parametrize("losses", [[10.0], FLAT], ids=["one-step", "no-change"])
def test_chart_of_a_single_value_has_a_mark_for_each_step(losses):
    assert len(marks([cpu(losses), ours(losses)], "●")) == len(losses)


def test_a_column_without_losses_leaves_the_others_drawn():
    assert len(marks([cpu(), stock([]), ours()], "●")) == len(FALLING)


def test_legend_names_every_column():
    legend = draw([cpu(), stock(FLAT), ours()], 80).plain.splitlines()[-1]

    assert all(name in legend for name in ("CPU", "■ xla:0, stock torch", "● xla:0, devconv"))
