"""`devconv check` and `devconv new-backend`: what they print, write and return."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from devconv.cli.application import app
from devconv.conformance import catalogue

pytestmark = pytest.mark.timeout(240)


def invoke(*arguments: str):
    return CliRunner().invoke(app, [*arguments])


def test_checks_are_listed_with_their_promises():
    result = invoke("check", "--list", "--group", "rng")

    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert [line.split()[0] for line in lines] == [check.id for check in catalogue() if check.group == "rng"]


def test_a_sound_device_ends_with_status_0_and_writes_its_reports(tmp_path):
    page, xml, data = tmp_path / "out.md", tmp_path / "out.xml", tmp_path / "out.json"

    result = invoke(
        *("check", "cpu", "--group", "rng", "--report", str(page), "--junit", str(xml), "--json", str(data))
    )

    assert result.exit_code == 0, result.output
    assert "cpu keeps its promises" in result.output.splitlines()[-1]
    assert "cpu keeps its promises" in page.read_text()
    assert "<testsuite" in xml.read_text()
    assert json.loads(data.read_text())["ok"] is True


def test_a_promise_that_is_not_kept_ends_with_status_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tired.py").write_text(
        "import devconv\nfrom devconv_cpu import CpuBackend\n"
        "class Tired(CpuBackend):\n"
        "    def synchronize(self, device=None):\n"
        "        raise RuntimeError('not today')\n"
        "devconv.register(Tired)\n"
    )

    result = invoke("check", "cpu", "--group", "registry", "--import", "tired", "--quiet")

    assert result.exit_code == 1
    assert "not today" in result.output
    assert "cure: " in result.output


def test_a_device_that_is_not_here_ends_with_status_3(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "absent.py").write_text(
        "import devconv\n"
        "class Absent(devconv.Backend):\n"
        "    device_type = 'absent'\n"
        "    def load(self):\n"
        "        raise devconv.UnavailableDeviceError('absent', 'no board', 'Plug one in.')\n"
        "devconv.register(Absent)\n"
    )

    result = invoke("check", "absent", "--import", "absent", "--quiet")

    assert result.exit_code == 3
    assert "no board" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check"], "name the device type"),
        (["check", "cpu", "--group", "nonsense"], "no such group: nonsense"),
        (["check", "cpu", "--manifest", "no/such/file.toml"], "no/such/file.toml"),
        (["new-backend", "Not-A-Name"], "lower-case"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_why(arguments, said):
    result = invoke(*arguments)

    assert result.exit_code == 2
    assert said in result.output.replace("│", " ").replace("\n", " ").replace("  ", " ")


def test_a_package_is_started_where_one_wants_it(tmp_path):
    result = invoke("new-backend", "acme", "--folder", str(tmp_path))

    assert result.exit_code == 0
    assert (tmp_path / "devconv-acme" / "src" / "devconv_acme" / "__init__.py").is_file()
    assert f"cd {tmp_path / 'devconv-acme'}" in result.output.replace("\n  ", " ")
