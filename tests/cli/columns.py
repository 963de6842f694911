"""Columns of the demo with figures of our choice, for the parts that only read them."""

from __future__ import annotations

from devconv.cli.training import Census, Column, Way

WHOLE = Census(parameters=106, in_optimizer=106, tied=2)
FALLING = [10.0, 8.0, 5.0, 4.0]


def cpu(losses=FALLING):
    return Column(Way.CPU, "cpu", WHOLE, WHOLE, losses=list(losses))


def stock(losses=FALLING, after=WHOLE, error=""):
    return Column(Way.STOCK, "xla:0", WHOLE, after, losses=list(losses), error=error)


def ours(losses=FALLING, after=WHOLE, error=""):
    return Column(Way.DEVCONV, "xla:0", WHOLE, after, losses=list(losses), error=error)
