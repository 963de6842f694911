"""A result as text for a terminal, as Markdown for people, as JUnit XML for CI and as JSON for programs."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

from .check import GROUPS
from .outcome import Outcome, Result, Status

__all__ = ["to_json", "to_junit", "to_markdown", "to_text"]

_ORDER = tuple(Status)


def _summary(result: Result) -> str:
    counts = result.counts
    return ", ".join(f"{counts[status]} {status.value}" for status in _ORDER if counts[status])


def _verdict(result: Result) -> str:
    if result.facts.get("missing"):
        return f"{result.device_type} is not here: {result.facts['missing']}"
    where = " on the stand-in" if result.facts.get("stand_in") else ""
    return f"{result.device_type} {'keeps' if result.ok else 'does not keep'} its promises{where}: {_summary(result)}"


def to_text(result: Result) -> str:
    """A table of groups, then every failure with its cure, then one line."""
    groups = [group for group in GROUPS if any(outcome.check.group == group for outcome in result.outcomes)]
    lines = [f"{'group':<12} {'passed':>6} {'n/a':>5} {'gaps':>5} {'failed':>6}"]
    for group in groups:
        mine = [outcome for outcome in result.outcomes if outcome.check.group == group]
        passed, inapplicable, gaps = (
            sum(outcome.status is status for outcome in mine)
            for status in (Status.PASSED, Status.NOT_APPLICABLE, Status.GAP)
        )
        failed = sum(not outcome.status.good for outcome in mine)
        lines.append(f"{group:<12} {passed:>6} {inapplicable:>5} {gaps:>5} {failed:>6}")
    for outcome in result.outcomes:
        if outcome.status is Status.GAP:
            lines += ["", f"gap     {outcome.check.id}", f"        {outcome.why}"]
    for outcome in result.failures:
        if outcome.status is not Status.NOT_RUN:
            lines += ["", f"{outcome.status.value:<8}{outcome.check.id}: {outcome.check.promise}"]
            lines += [f"        {outcome.why}", f"        cure: {outcome.check.cure}"]
    return "\n".join([*lines, "", f"{_verdict(result)} ({result.seconds:.1f} s)"])


def to_markdown(result: Result) -> str:
    """The whole result as a page: what was examined, the table of checks, details of what failed."""
    facts = result.facts
    lines = [f"# devconv conformance of `{result.device_type}`", "", f"**{_verdict(result)}.**", ""]
    if facts.get("backend"):
        lines += [
            f"- backend: `{facts['backend']}` from {facts['origin']}, `in_place={facts['in_place']}`",
            f"- devices: {facts['devices']} ({facts['device']} first)",
            f"- with: devconv {facts['devconv']}, torch {facts['torch']}, Python {facts['python']}",
            "- capabilities: " + ", ".join(f"`{name}={value}`" for name, value in facts["capabilities"].items()),
            f"- seconds: {result.seconds:.1f}",
            "",
        ]
    lines += ["| check | promise | outcome | |", "|---|---|---|---|"]
    lines += [
        f"| {outcome.check.id} | {_cell(outcome.check.promise)} | {outcome.status.value} | {_cell(outcome.why)} |"
        for outcome in result.outcomes
    ]
    for outcome in result.failures:
        lines += ["", f"## {outcome.check.id}: {outcome.status.value}", "", outcome.check.promise, ""]
        lines += [f"Seen: {outcome.why}", "", f"Cure: {outcome.check.cure}"]
        if outcome.detail:
            lines += ["", "```", outcome.detail.rstrip().replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def to_junit(result: Result) -> str:
    """JUnit XML: gaps and checks that are not applicable are skipped, with their reasons."""
    suite = ET.Element(
        "testsuite",
        name=f"devconv.conformance.{result.device_type}",
        tests=str(len(result.outcomes)),
        failures=str(len(result.failures)),
        errors="0",
        skipped=str(sum(_skipped(outcome) for outcome in result.outcomes)),
        time=f"{result.seconds:.3f}",
    )
    for outcome in result.outcomes:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"devconv.conformance.{outcome.check.group}",
            name=outcome.check.name,
            time=f"{outcome.seconds:.3f}",
        )
        if _skipped(outcome):
            ET.SubElement(case, "skipped", message=f"{outcome.status.value}: {_printable(outcome.why)}")
        elif not outcome.status.good:
            message = f"{outcome.status.value}: {outcome.why} Cure: {outcome.check.cure}"
            failure = ET.SubElement(case, "failure", message=_printable(message), type=outcome.status.value)
            failure.text = _printable(outcome.detail)
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _skipped(outcome: Outcome) -> bool:
    return outcome.status in (Status.NOT_APPLICABLE, Status.GAP)


def _printable(text: str) -> str:
    # XML 1.0 has no way to write most control characters, and a dying driver may print any.
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def to_json(result: Result) -> str:
    """Everything, as one JSON object."""
    return json.dumps(
        {
            "device_type": result.device_type,
            "ok": result.ok,
            "seconds": round(result.seconds, 3),
            "counts": {status.value: result.counts[status] for status in _ORDER},
            "facts": {name: value for name, value in result.facts.items() if not name.startswith("manifest")},
            "checks": [
                {
                    "id": outcome.check.id,
                    "promise": outcome.check.promise,
                    "cure": outcome.check.cure,
                    "status": outcome.status.value,
                    "why": outcome.why,
                    "detail": outcome.detail,
                    "seconds": round(outcome.seconds, 4),
                }
                for outcome in result.outcomes
            ],
        },
        indent=2,
    )
