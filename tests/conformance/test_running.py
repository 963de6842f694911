"""Checks run in a process that they may abort or hang: it is reported, and the rest goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devconv.conformance import Examiner, ManifestError, Status, catalogue, run
from devconv.conformance import running as running_module

CHECKS = {check.id: check for check in catalogue()}

VENDOR = """
import os, time, torch, devconv
from devconv_cpu import CpuBackend

print("a vendor that talks on stdout")
os.system("echo and lets its children talk")

class Vendor(CpuBackend):
    def load(self):
        {load}
    def send(self, tensors, device, *, dtypes=None, non_blocking=False):
        if dtypes is not None:
            {send}
        return super().send(tensors, device, dtypes=dtypes)
    def copy(self, tensors, device, *, dtypes=None, non_blocking=False):
        if dtypes is not None:
            {copy}
        return super().copy(tensors, device, dtypes=dtypes)

devconv.register(Vendor)
"""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the module of a vendor who serves ``cpu``, with its faults, and work beside it."""

    def write(load: str = "pass", send: str = "pass", copy: str = "pass") -> str:
        (tmp_path / "vendor.py").write_text(VENDOR.format(load=load, send=send, copy=copy))
        return "vendor"

    monkeypatch.chdir(tmp_path)
    return write


def examine(names: list[str], **arguments):
    return {
        outcome.check.id: outcome
        for outcome in run("cpu", checks=[CHECKS[name] for name in names], **arguments).outcomes
    }


def test_a_check_that_aborts_or_hangs_is_reported_and_the_rest_goes_on(vendor):
    names = [
        "moves.send_casts_as_asked",
        "moves.an_empty_batch_is_allowed",
        "moves.copy_casts_on_the_device",
        "moves.fetch_casts_as_asked",
    ]
    module = vendor(send="os.abort()", copy="time.sleep(600)")

    outcomes = examine(names, imports=[module], timeout=20)

    assert [outcomes[name].status for name in names] == [Status.CRASHED, Status.PASSED, Status.HUNG, Status.PASSED]
    assert "SIGABRT" in outcomes[names[0]].why
    assert 'vendor.py", line' in outcomes[names[0]].detail
    assert 'vendor.py", line' in outcomes[names[2]].detail


def test_a_crash_in_a_move_names_the_move(vendor):
    name = "optimizers.the_optimizer_holds_the_models_parameters"

    outcome = examine([name], imports=[vendor(copy="os._exit(7)")])[name]

    assert outcome.status is Status.CRASHED
    assert "exit status 7" in outcome.why
    assert "cpu -> cpu float64" in outcome.why


def test_a_backend_that_aborts_while_it_loads_fails_once_and_nothing_else_is_run(vendor):
    names = ["registry.backend_loads", "ties.a_shared_parameter_stays_one"]

    outcomes = examine(names, imports=[vendor(load="os.abort()")])

    assert [outcomes[name].status for name in names] == [Status.CRASHED, Status.NOT_RUN]
    assert "did not load" in outcomes[names[1]].why


def test_a_backend_that_hangs_while_it_loads_is_given_up(vendor, monkeypatch):
    monkeypatch.setattr(running_module, "LOAD_SECONDS", 15.0)

    outcomes = examine(["registry.backend_loads"], imports=[vendor(load="time.sleep(600)")])

    assert outcomes["registry.backend_loads"].status is Status.HUNG


def test_missing_hardware_is_no_failure_and_no_success(vendor):
    module = vendor(load="raise devconv.UnavailableDeviceError('cpu', 'no board', 'Plug one in.')")

    result = run("cpu", imports=[module])

    assert {outcome.status for outcome in result.outcomes} == {Status.NOT_RUN}
    assert "no board" in result.facts["missing"]
    assert not result.ok


def test_a_manifest_decides_what_a_failure_is(vendor, tmp_path):
    failing, sound = "moves.send_casts_as_asked", "moves.an_empty_batch_is_allowed"
    module = vendor(send="raise ValueError('no casts here')")
    manifest = tmp_path / "gaps.toml"
    manifest.write_text(f'[gaps]\n"{failing}" = "the board casts in firmware 2"\n"{sound}" = "not true"\n')

    declared = examine([failing, sound], imports=[module], manifest=manifest)
    undeclared = examine([failing], imports=[module])

    assert declared[failing].status is Status.GAP
    assert "firmware 2" in declared[failing].why
    assert "no casts here" in declared[failing].why
    assert declared[sound].status is Status.STALE_GAP
    assert undeclared[failing].status is Status.FAILED


def test_the_manifest_beside_the_backend_is_found(vendor, tmp_path):
    failing = "moves.send_casts_as_asked"
    module = vendor(send="raise ValueError('no casts here')")
    (tmp_path / "conformance.toml").write_text(f'[gaps]\n"{failing}" = "the board casts in firmware 2"\n')

    assert examine([failing], imports=[module])[failing].status is Status.GAP


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[gaps]\n"moves.no_such_check" = "x"', "no check is called 'moves.no_such_check'"),
        ('[gaps]\n"moves.send_makes_copies" = " "', "has no reason"),
        ('[gap]\n"moves.send_makes_copies" = "x"', "unknown entry 'gap'"),
        ("[gaps", "not readable as TOML"),
    ],
)
def test_a_manifest_that_means_nothing_is_refused(tmp_path, text, said):
    manifest = tmp_path / "gaps.toml"
    manifest.write_text(text)

    with pytest.raises(ManifestError, match=r"gaps\.toml") as raised:
        Examiner("cpu", manifest=manifest)

    assert said in str(raised.value)


def test_collecting_the_checks_imports_neither_torch_nor_a_backend():
    program = (
        "import sys, pytest\n"
        "arguments = ['-q', '--collect-only', '--pyargs', 'devconv.conformance', '--devconv-device=acme']\n"
        "status = pytest.main(arguments)\n"
        "seen = {'torch', 'devconv_cpu', 'devconv_xla'} & set(sys.modules)\n"
        "sys.exit(f'status {status}, imported {seen}' if status or seen else 0)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}

    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd="/",
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("test_promises.py::test_promise[") == len(catalogue())
