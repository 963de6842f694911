"""The listing: every device type with its package and status, whatever one of the packages does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import devconv
from devconv.cli.application import app
from devconv.probing import Presence

pytestmark = [pytest.mark.lane("cpu"), pytest.mark.timeout(300)]

LOADS = {
    "available": "pass",
    "missing hardware": "raise devconv.UnavailableDeviceError('boom', 'no board', 'Plug one in.')",
    "broken": "import os; os.abort()",
}


@pytest.fixture
def listing(tmp_path):
    """Run the command where a distribution is installed whose backend for ``boom`` loads as told."""

    def run(load, *arguments):
        (tmp_path / "boom_devices.py").write_text(
            "import devconv\n"
            "class Boom(devconv.Backend):\n"
            "    device_type = 'boom'\n"
            "    def load(self):\n"
            f"        {load}\n"
        )
        info = tmp_path / "boom_devices-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: boom-devices\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[devconv.backends]\nboom = boom_devices:Boom\n")
        return subprocess.run(
            [sys.executable, "-m", "devconv", "backends", *arguments],
            env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.mark.parametrize("status", LOADS)
def test_status_is_how_the_backend_loads_and_the_others_are_listed_all_the_same(listing, status):
    result = listing(LOADS[status], "boom", "cpu", "--json")

    lines = {line["device_type"]: line for line in json.loads(result.stdout)}
    assert result.returncode == 0
    assert lines["boom"]["status"] == status
    assert lines["boom"]["origin"] == "boom-devices 1.2"
    assert lines["boom"]["devices"] == (1 if status == "available" else 0)
    assert lines["cpu"]["devices"] == 1


def test_a_backend_that_this_process_uses_is_loaded():
    devconv.resolve("cpu")

    result = CliRunner().invoke(app, ["backends", "cpu", "--json"])

    assert [line["status"] for line in json.loads(result.stdout)] == ["loaded"]


def test_table_says_why_a_device_is_not_here_and_what_to_do(listing):
    result = listing(LOADS["missing hardware"], "boom")

    row = next(line for line in result.stdout.splitlines() if "boom-devices" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["boom", "boom-devices 1.2", "missing hardware", "-"]
    assert "boom: no board. Plug one in." in result.stdout


def test_every_backend_is_listed_without_being_named(monkeypatch):
    monkeypatch.setattr(devconv, "probe", lambda device_type, *, timeout: Presence("there", 1))

    result = CliRunner().invoke(app, ["backends", "--json"])

    assert [line["device_type"] for line in json.loads(result.stdout)] == devconv.known()


def test_a_type_that_nobody_serves_exits_with_2_and_names_those_that_are_served():
    result = CliRunner().invoke(app, ["backends", "acme-9"])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "acme-9" in result.stderr
    assert "meta" in result.stderr
