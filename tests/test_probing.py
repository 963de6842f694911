"""Vendors' packages that abort, hang, exit or disagree: each breaks its own device and no other.

Every package here is a distribution on disk with metadata and a module, found by its entry point as an installed one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import devconv
from devconv import registry

LOADS = {
    "there": "pass",
    "missing": "raise devconv.UnavailableDeviceError('boom', 'no board', 'Plug one in.')",
    "raises": "raise OSError('libboom.so not found')",
    "exits": "raise SystemExit('no driver')",
    "aborts": "import os; os.abort()",
    "hangs": "import time; time.sleep(300)",
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Install a distribution whose backend loads as told; returns its module's name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, fresh in (("_discovered", None), ("_registered", {})):
        monkeypatch.setattr(registry, name, fresh)

    def install(load: str, distribution: str = "boom-devices", device_type: str = "boom", body: str = "") -> str:
        module = distribution.replace("-", "_") + f"_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(
            "import devconv\n"
            "class Boom(devconv.Backend):\n"
            f"    device_type = {device_type!r}\n"
            f"    {body or 'pass'}\n"
            "    def load(self):\n"
            f"        {LOADS[load]}\n"
        )
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[devconv.backends]\n{device_type} = {module}:Boom\n")
        return module

    return install


def status_of(device_type: str) -> str:
    (found,) = [entry for entry in devconv.registrations() if entry.device_type == device_type]
    return found.status


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("load", "seconds", "error", "said", "status"),
    [
        ("aborts", 60, devconv.BackendLoadError, "SIGABRT", "broken"),
        ("hangs", 6, devconv.BackendLoadError, "hangs", "broken"),
        ("missing", 60, devconv.UnavailableDeviceError, "Plug one in.", "missing hardware"),
    ],
)
def test_a_backend_that_asks_for_it_is_tried_in_a_process_of_its_own(install, load, seconds, error, said, status):
    install(load, body=f"probe_timeout = {seconds}")

    with pytest.raises(error, match=said):
        devconv.backend_for("boom")

    assert status_of("boom") == status
    assert devconv.resolve("cpu")[1].device_type == "cpu"


@pytest.mark.timeout(120)
def test_a_backend_that_passes_its_probe_is_loaded(install):
    install("there", body="probe_timeout = 60")

    backend = devconv.backend_for("boom")

    assert backend.device_type == "boom"
    assert status_of("boom") == "loaded"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("load", "seconds", "state", "said"),
    [
        ("there", 60, "there", ""),
        ("missing", 60, "missing", "no board"),
        ("raises", 60, "broken", "OSError: libboom.so not found"),
        ("exits", 60, "broken", "SystemExit: no driver"),
        ("aborts", 60, "broken", "SIGABRT"),
        ("hangs", 6, "broken", "hangs"),
    ],
)
def test_probing_tells_how_a_backend_loads_and_loads_nothing_here(install, load, seconds, state, said):
    install(load)

    found = devconv.probe("boom", timeout=seconds)

    assert found.state == state
    assert said in found.why
    assert found.devices == (1 if state == "there" else 0)
    assert status_of("boom") == "installed"


def test_probing_an_unknown_type_says_which_are_known():
    with pytest.raises(devconv.UnknownDeviceError, match="cpu"):
        devconv.probe("no_such_device")


def test_a_library_that_ends_the_program_is_a_load_error(install):
    install("exits")

    with pytest.raises(devconv.BackendLoadError, match=r"boom-devices 1\.2.*SystemExit: no driver"):
        devconv.backend_for("boom")


@pytest.mark.timeout(60)
def test_a_backend_that_hangs_in_one_thread_stops_no_other(install, monkeypatch):
    module = install("there")
    entered, leave = threading.Event(), threading.Event()

    def hang(self):
        entered.set()
        leave.wait(50)

    monkeypatch.setattr(__import__(module).Boom, "load", hang)
    thread = threading.Thread(target=devconv.backend_for, args=("boom",))
    thread.start()
    assert entered.wait(20)

    try:
        assert devconv.resolve("cpu")[1].device_type == "cpu"
        assert "boom" in devconv.known()
        devconv.register(type("Other", (devconv.Backend,), {"device_type": "other"}))
        devconv.unregister("other")
        assert status_of("boom") == "installed"
    finally:
        leave.set()
        thread.join()


@pytest.mark.parametrize(("version", "cure"), [(10**6, "Upgrade devconv"), (0, "Upgrade that package")])
def test_a_contract_that_does_not_fit_says_which_side_to_upgrade(install, version, cure):
    install("there", body=f"api_version = {version}")

    with pytest.raises(devconv.BackendLoadError, match=f"version {version} of.*{cure}") as raised:
        devconv.backend_for("boom")

    assert raised.value.distribution == "boom-devices 1.2"


def test_two_distributions_for_one_type_are_refused_by_name(install):
    install("there", "boom-devices")
    install("there", "rival-devices")

    with pytest.raises(devconv.DuplicateBackendError) as raised:
        devconv.backend_for("boom")

    assert {"boom-devices 1.2", "rival-devices 1.2"} == {raised.value.first, raised.value.second}
    assert status_of("boom") == "broken"
    assert devconv.probe("boom").state == "broken"


def test_a_program_decides_between_two_distributions(install):
    install("there", "boom-devices")
    install("there", "rival-devices")
    chosen = type("Chosen", (devconv.Backend,), {"device_type": "boom"})

    devconv.register(chosen)

    assert type(devconv.backend_for("boom")) is chosen
