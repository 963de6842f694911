"""What the demo concludes, from figures of our choice."""

from __future__ import annotations

import math

import pytest

from devconv.cli.training import Census
from devconv.cli.verdict import TOLERANCE, holds, stock_in_one_sentence
from tests.cli.columns import FALLING, cpu, ours, stock

pytestmark = pytest.mark.lane("cpu")


def scaled(factor):
    return [*FALLING[:-1], FALLING[-1] * factor]


@pytest.mark.parametrize(
    ("column", "verdict"),
    [
        (ours(), True),
        (ours(scaled(1 + 0.9 * TOLERANCE)), True),
        (ours(scaled(1 - 0.9 * TOLERANCE)), True),
        (ours(scaled(1 + 1.1 * TOLERANCE)), False),
        (ours(scaled(1 - 1.1 * TOLERANCE)), False),
        (ours(scaled(math.nan)), False),
        (ours(scaled(math.inf)), False),
        (ours(FALLING[:-1]), False),
        (ours([]), False),
        (ours(error="RuntimeError: no"), False),
    ],
    ids=["same", "above", "below", "too-high", "too-low", "nan", "infinite", "a-step-short", "no-loss", "raised"],
)
def test_devconv_holds_if_every_loss_is_the_cpus_within_the_tolerance(column, verdict):
    assert holds(column, cpu()) is verdict


APART = "Stock torch made 108 parameters out of 106 (2 ties came apart)"
ADRIFT = "left the optimizer with {} of the model's {}"
BROKEN = Census(parameters=108, in_optimizer=0, tied=0)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (stock(), "Stock torch got nothing wrong on xla:0: its model trains as on the CPU."),
        (
            stock([10.0] * 4, BROKEN),
            f"{APART} and {ADRIFT.format('none', 108)}, so the loss stayed at 10.0000 for all 4 steps, without an error.",
        ),
        (
            stock([10.0, 9.0, 8.0, 7.0], Census(106, 50, 2)),
            f"Stock torch {ADRIFT.format(50, 106)}, so its losses are up to 75.0% away from the CPU's, without an error.",
        ),
        (stock([10.0] * 4), "With stock torch the loss stayed at 10.0000 for all 4 steps, without an error."),
        (stock(FALLING, Census(108, 108, 0)), f"{APART}."),
        (stock([], None, "RuntimeError: no"), "Stock torch did not get the model to xla:0: RuntimeError: no."),
        (stock([10.0], error="RuntimeError: no"), "With stock torch training ended with RuntimeError: no."),
    ],
    ids=["right", "both", "part-of-the-optimizer", "no-cause-seen", "no-effect-seen", "no-move", "raised-later"],
)
def test_sentence_on_stock_torch_says_what_the_figures_say(column, said):
    assert stock_in_one_sentence(column, cpu()) == said
