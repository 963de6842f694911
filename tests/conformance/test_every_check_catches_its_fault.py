"""The kit can fail: for every check there is a device with one fault that it catches, and a sound one that it passes."""

from __future__ import annotations

import sys

import pytest

import devconv
from devconv.conformance import Lane, Status, catalogue, perform, stand_in_for
from tests.conformance.faults import FAULTS, SECOND, planted

CHECKS = {check.id: check for check in catalogue()}
MARKS = {
    "cpu": (),
    # A process that runs torch_xla has no room for torch's lazy device.
    "lazy": pytest.mark.lane("cpu", "acme", "cuda", "newest"),
    SECOND: pytest.mark.needs(SECOND, 2),
}
CASES = [pytest.param(name, marks=MARKS[fault.device_type]) for name, fault in FAULTS.items()]


class Plain(devconv.Backend):
    """A vendor that overrides nothing."""

    device_type = "acme"


@pytest.fixture(autouse=True, scope="module")
def stand_in():
    yield stand_in_for(Plain)
    devconv.unregister("lazy")


def test_every_check_has_a_fault():
    assert FAULTS.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_check_catches_its_fault(name, tmp_path):
    with planted(FAULTS[name], tmp_path) as lane:
        outcome = perform(CHECKS[name], lane)

    assert outcome.status is Status.FAILED, outcome.why
    assert outcome.why


# Needs the device to lack a dtype or seed its own generator, which the sound stand-in does not; without those two a
# check must be quiet on it.
NOT_ON_A_SOUND_STAND_IN = {
    "registry.the_dtypes_that_are_denied_are_missing",
    "rng.own_rng_is_said_only_where_it_is_so",
    "failure.a_dtype_that_the_device_lacks_is_refused",
}


@pytest.mark.parametrize("name", CASES)
def test_the_check_passes_without_its_fault(name):
    outcome = perform(CHECKS[name], Lane(FAULTS[name].device_type))

    wanted = Status.NOT_APPLICABLE if name in NOT_ON_A_SOUND_STAND_IN else Status.PASSED
    assert outcome.status is wanted, outcome.why + outcome.detail


def test_the_stand_in_says_that_torch_xla_takes_its_place(stand_in, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", sys)

    with pytest.raises(devconv.UnavailableDeviceError, match="torch_xla"):
        stand_in().load()
