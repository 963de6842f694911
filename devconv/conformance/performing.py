"""Run one check in this process, for every move it applies to."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .check import Check
from .expecting import NotApplicable
from .lane import Lane
from .outcome import Outcome, Status

__all__ = ["function_of", "perform"]


def function_of(check: Check) -> Callable[..., None]:
    """The check's function. Imports torch."""
    function: Callable[..., None] = getattr(import_module(f"{__package__}.promises.{check.group}"), check.name)
    return function


def perform(check: Check, lane: Lane, *, progress: Callable[[str], Any] | None = None) -> Outcome:
    """Run `check` on `lane`.

    Args:
        check: from the catalogue.
        lane: the device.
        progress: called with the name of each move before it is tried, so that a process that watches this one knows
            where it died.

    Returns:
        Passed, failed or not applicable; a check over moves fails if it fails for one of them, and names each.
    """
    began = time.perf_counter()
    status, why, detail = _perform(check, lane, progress or (lambda name: None))
    return Outcome(check, status, why, detail, time.perf_counter() - began)


def _perform(check: Check, lane: Lane, progress: Callable[[str], Any]) -> tuple[Status, str, str]:
    try:
        lacking = lane.lacks(check.needs)
        moves = lane.moves if check.each_move and lacking is None else ()
        function = function_of(check)
    except Exception as error:  # noqa: BLE001 - a backend under examination may raise anything
        return Status.FAILED, _line(error), traceback.format_exc()
    if lacking is not None:
        return Status.NOT_APPLICABLE, lacking, ""
    if not check.each_move:
        return _once(lambda: function(lane))
    failures, skipped, kept = [], [], 0
    for move in moves:
        progress(move.name)
        status, why, detail = _once(lambda move=move: function(lane, move))  # type: ignore[misc]
        if status is Status.FAILED:
            failures.append((f"{move.name}: {why}", detail))
        elif status is Status.NOT_APPLICABLE:
            skipped.append(f"{move.name}: {why}")
        else:
            kept += 1
    if failures:
        return Status.FAILED, "; ".join(why for why, _ in failures), "\n".join(detail for _, detail in failures)
    if not kept:
        return Status.NOT_APPLICABLE, "; ".join(skipped) or "the device has no conversion to try", ""
    return Status.PASSED, "", ""


def _once(call: Callable[[], None]) -> tuple[Status, str, str]:
    try:
        call()
    except NotApplicable as reason:
        return Status.NOT_APPLICABLE, str(reason), ""
    except Exception as error:  # noqa: BLE001 - whatever a device raises is what was seen
        return Status.FAILED, _line(error), traceback.format_exc()
    return Status.PASSED, "", ""


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
