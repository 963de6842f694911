"""What the columns of the demo say: how far devconv is from the CPU, and what stock torch got wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .training import Column

__all__ = ["TOLERANCE", "farthest", "holds", "stock_in_one_sentence"]

TOLERANCE = 1e-3
"""Largest relative difference of two losses that still counts as the same training."""


def farthest(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two curves; infinite if they cannot be compared.

    >>> round(farthest([10.0, 9.0], [10.0, 8.0]), 6)
    0.125
    >>> farthest([10.0], [10.0, 8.0]), farthest([math.nan], [10.0])
    (inf, inf)
    """
    if not losses or len(losses) != len(reference) or not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(loss - right) / abs(right) for loss, right in zip(losses, reference, strict=True))


def holds(ours: Column, cpu: Column) -> bool:
    """Whether devconv's column trained as the CPU's did."""
    return not ours.error and farthest(ours.losses, cpu.losses) <= TOLERANCE


def stock_in_one_sentence(stock: Column, cpu: Column) -> str:
    """What stock torch got wrong, from nothing but the figures."""
    if stock.after is None:
        return f"Stock torch did not get the model to {stock.device}: {stock.error}."
    causes = []
    if stock.after.parameters != stock.before.parameters:
        gone = stock.before.tied - stock.after.tied
        ties = f" ({gone} ties came apart)" if gone > 0 else ""
        causes.append(f"made {stock.after.parameters} parameters out of {stock.before.parameters}{ties}")
    if stock.after.in_optimizer < stock.after.parameters:
        held = stock.after.in_optimizer or "none"
        causes.append(f"left the optimizer with {held} of the model's {stock.after.parameters}")
    effect = _effect(stock, cpu)
    if causes:
        return f"Stock torch {' and '.join(causes)}{f', so {effect}' if effect else ''}."
    if effect:
        return f"With stock torch {effect}."
    return f"Stock torch got nothing wrong on {stock.device}: its model trains as on the CPU."


def _effect(stock: Column, cpu: Column) -> str:
    if stock.error:
        return f"training ended with {stock.error}"
    distance = farthest(stock.losses, cpu.losses)
    if distance <= TOLERANCE:
        return ""
    stays = farthest(stock.losses, stock.losses[:1] * len(stock.losses)) <= TOLERANCE
    if stays and len(stock.losses) > 1:
        return f"the loss stayed at {stock.losses[0]:.4f} for all {len(stock.losses)} steps, without an error"
    return f"its losses are up to {distance:.1%} away from the CPU's, without an error"
