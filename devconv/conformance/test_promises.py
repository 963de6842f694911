"""One test a check: ``pytest --pyargs devconv.conformance --devconv-device=TYPE``.

The checks run in a worker process, in the order of the catalogue; collecting them imports neither torch nor the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from devconv.conformance import Check, Examiner, Status, catalogue


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each check of the catalogue."""
    if metafunc.config.getoption("--devconv-device") is None:
        raise pytest.UsageError("name the device to examine: --devconv-device=TYPE, or DEVCONV_DEVICE=TYPE")
    metafunc.parametrize("check", [pytest.param(check, id=check.id) for check in catalogue()])


@pytest.fixture(scope="module")
def examiner(pytestconfig: pytest.Config) -> Iterator[Examiner]:
    """The device under examination, in a process of its own."""
    with Examiner(
        pytestconfig.getoption("--devconv-device"),
        manifest=pytestconfig.getoption("--devconv-manifest"),
        imports=pytestconfig.getoption("--devconv-import"),
        timeout=pytestconfig.getoption("--devconv-timeout"),
        stand_in=pytestconfig.getoption("--devconv-stand-in"),
    ) as examiner:
        yield examiner


def test_promise(check: Check, examiner: Examiner) -> None:
    """The device keeps the promise, or its vendor has declared that it does not."""
    outcome = examiner.examine(check)
    if outcome.status is Status.NOT_APPLICABLE:
        pytest.skip(outcome.why)
    if outcome.status is Status.NOT_RUN and examiner.missing and not _required(examiner.device_type):
        pytest.skip(outcome.why)
    if outcome.status is Status.GAP:
        pytest.xfail(outcome.why)
    if not outcome.status.good:
        pytest.fail(
            f"{outcome.status.value}: {check.promise}\nseen: {outcome.why}\ncure: {check.cure}\n\n{outcome.detail}",
            pytrace=False,
        )


def _required(device_type: str) -> bool:
    return device_type in os.environ.get("DEVCONV_REQUIRE", "").split(",")
