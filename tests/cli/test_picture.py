"""The curves as a picture, read back from the file."""

from __future__ import annotations

import pytest
from matplotlib import colors, image

from devconv.cli.picture import paint
from devconv.cli.series import COLOURS
from devconv.cli.training import Census, Way
from tests.cli.columns import cpu, ours, stock

pytestmark = pytest.mark.lane("cpu")

STOCK = stock([10.0] * 4, Census(parameters=108, in_optimizer=0, tied=0))


def heights(path, way):
    """Share of the picture's height, from the top, of the highest and the lowest pixel in a column's colour."""
    pixels = image.imread(path)
    rows = (abs(pixels[:, :, :3] - colors.to_rgb(COLOURS[way])).max(2) < 0.02).any(1).nonzero()[0]
    return rows[0] / len(pixels), rows[-1] / len(pixels)


def test_picture_has_the_curves_of_stock_torch_and_devconv(tmp_path):
    path = tmp_path / "curves.png"

    paint([cpu(), STOCK, ours()], path)

    # The highest of each colour is the curve's or the words above it, the lowest the curve's end or the legend's line.
    assert heights(path, Way.STOCK)[0] < 0.2
    assert heights(path, Way.DEVCONV)[0] < 0.2
    assert heights(path, Way.DEVCONV)[1] > 0.55


def test_the_curve_of_the_cpu_is_seen_around_that_of_devconv(tmp_path):
    with_cpu, without = tmp_path / "with.png", tmp_path / "without.png"

    paint([cpu(), STOCK, ours()], with_cpu)
    paint([cpu([]), STOCK, ours()], without)

    assert (image.imread(with_cpu) != image.imread(without)).any(2).mean() > 0.003


def test_the_ending_says_which_kind_of_picture(tmp_path):
    path = tmp_path / "curves.svg"

    paint([cpu(), STOCK, ours()], path)

    assert "<svg" in path.read_text()


@pytest.mark.parametrize("losses", [[], [10.0]], ids=["no-loss", "one-step"])
def test_a_column_that_got_nowhere_leaves_the_picture_drawn(tmp_path, losses):
    path = tmp_path / "curves.png"

    paint([cpu(), stock(losses, None, "RuntimeError: no"), ours()], path)

    assert path.stat().st_size > 10_000
