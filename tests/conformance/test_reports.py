"""Reports say what was examined, what came of it, and the cure; a broken device cannot break them."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from devconv.conformance import Outcome, Result, Status, catalogue, to_json, to_junit, to_markdown, to_text
from devconv.conformance.outcome import judge

CHECKS = catalogue()
STATUSES = [
    Status.PASSED,
    Status.FAILED,
    Status.CRASHED,
    Status.HUNG,
    Status.NOT_APPLICABLE,
    Status.GAP,
    Status.STALE_GAP,
    Status.NOT_RUN,
]


@pytest.fixture
def result() -> Result:
    """One outcome of each kind, from a device that prints what no format likes."""
    outcomes = tuple(
        Outcome(check, status, f"why | {status.value} <&>", "\x1b[31mtrace ```\x00", 0.5)
        for check, status in zip(CHECKS, STATUSES, strict=False)
    )
    facts = {
        "backend": "acme.Backend",
        "origin": "acme 1.0",
        "in_place": None,
        "devices": 2,
        "device": "acme:0",
        "devconv": "0",
        "torch": "2",
        "python": "3",
        "capabilities": {"strides": True},
    }
    return Result("acme", facts, outcomes, 3.0)


def test_junit_is_xml_that_counts_failures_and_gaps(result):
    suite = ET.fromstring(to_junit(result)).find("testsuite")

    assert suite is not None
    assert suite.attrib["tests"] == str(len(STATUSES))
    assert suite.attrib["failures"] == "5"
    assert suite.attrib["skipped"] == "2"
    assert len(suite.findall("testcase/failure")) == 5
    assert len(suite.findall("testcase/skipped")) == 2


def test_json_holds_every_outcome(result):
    read = json.loads(to_json(result))

    assert [check["status"] for check in read["checks"]] == [status.value for status in STATUSES]
    assert read["counts"]["declared gap"] == 1
    assert read["ok"] is False


def test_markdown_has_a_row_for_each_check_and_the_cure_of_each_failure(result):
    page = to_markdown(result)

    rows = [line for line in page.splitlines() if line.startswith(tuple(f"| {check.group}." for check in CHECKS))]
    assert len(rows) == len(STATUSES)
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
    assert page.count("Cure: ") == len(result.failures)
    assert page.count("```") == 2 * len(result.failures)


def test_text_ends_with_the_verdict(result):
    last = to_text(result).splitlines()[-1]

    assert last.startswith("acme does not keep its promises: 1 passed, 1 failed")


@pytest.mark.parametrize(
    ("statuses", "ok"),
    [
        ([Status.PASSED, Status.GAP, Status.NOT_APPLICABLE], True),
        ([Status.NOT_APPLICABLE, Status.GAP], False),
        ([], False),
        *(([Status.PASSED, bad], False) for bad in STATUSES if not bad.good),
    ],
)
def test_a_run_is_green_only_if_something_passed_and_nothing_is_wrong(statuses, ok):
    outcomes = tuple(Outcome(check, status) for check, status in zip(CHECKS, statuses, strict=False))

    assert Result("acme", {}, outcomes).ok is ok


@pytest.mark.parametrize(
    ("seen", "judged"),
    [
        (Status.FAILED, Status.GAP),
        (Status.CRASHED, Status.GAP),
        (Status.HUNG, Status.GAP),
        (Status.PASSED, Status.STALE_GAP),
        (Status.NOT_APPLICABLE, Status.NOT_APPLICABLE),
        (Status.NOT_RUN, Status.NOT_RUN),
    ],
)
def test_a_declared_gap_excuses_a_failure_and_nothing_else(seen, judged):
    outcome = judge(Outcome(CHECKS[0], seen), {CHECKS[0].id: "not yet"})

    assert outcome.status is judged
