"""What came of each check, and of all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from .check import Check

__all__ = ["Outcome", "Result", "Status", "judge"]


class Status(Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    HUNG = "hung"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"
    GAP = "declared gap"
    STALE_GAP = "stale gap"

    @property
    def good(self) -> bool:
        """Whether a run with this outcome can still be green."""
        return self in (Status.PASSED, Status.NOT_APPLICABLE, Status.GAP)


@dataclass(frozen=True)
class Outcome:
    """How one check ended on one device.

    Attributes:
        check: what was promised.
        status: how it ended.
        why: one line: what was seen, why it is not applicable, or the reason given for the gap.
        detail: the traceback, or the last lines that the process wrote before it died.
        seconds: how long it took.
    """

    check: Check
    status: Status
    why: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """A whole run.

    Attributes:
        device_type: the device that was examined.
        facts: what the backend says of itself: origin, versions, devices, capabilities.
        outcomes: one for each check.
        seconds: how long the run took, the start of its processes included.
    """

    device_type: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Something passed, nothing failed that was not declared, and nothing was declared that works."""
        return self.counts[Status.PASSED] > 0 and all(outcome.status.good for outcome in self.outcomes)

    @property
    def counts(self) -> Counter[Status]:
        """How many checks ended how."""
        return Counter(outcome.status for outcome in self.outcomes)

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The outcomes that make the run red."""
        return tuple(outcome for outcome in self.outcomes if not outcome.status.good)


def judge(outcome: Outcome, gaps: Mapping[str, str]) -> Outcome:
    """`outcome` in the light of the declared gaps.

    Args:
        outcome: what was seen.
        gaps: check id -> the vendor's reason.

    Returns:
        A failure that was declared becomes a gap, a declared gap that passes becomes a stale gap, which is a failure.
    """
    reason = gaps.get(outcome.check.id)
    if reason is None:
        return outcome
    if outcome.status is Status.PASSED:
        return replace(
            outcome,
            status=Status.STALE_GAP,
            why=f"declared as a gap ({reason}), but the promise is kept: remove it from the manifest",
        )
    if outcome.status in (Status.FAILED, Status.CRASHED, Status.HUNG):
        return replace(outcome, status=Status.GAP, why=f"{reason} (seen: {outcome.why})")
    return outcome
