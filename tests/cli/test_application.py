"""The command as a whole: what it offers, under which names, and how it refuses."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from typer.testing import CliRunner

import devconv
from devconv.cli import main
from devconv.cli.application import app

pytestmark = pytest.mark.lane("cpu")


@pytest.mark.parametrize("command", ["demo", "backends", "check", "new-backend"])
def test_help_lists_every_command(command):
    result = CliRunner().invoke(app, ["--help"])

    assert result.exit_code == 0
    assert f" {command} " in result.stdout


def test_python_dash_m_is_the_console_script():
    (script,) = entry_points(group="console_scripts", name="devconv")

    said = subprocess.run(
        [sys.executable, "-m", "devconv", "--version"], capture_output=True, text=True, timeout=120, check=True
    )

    assert script.load() is main
    assert said.stdout == f"devconv {devconv.__version__}\n"


def test_unknown_command_exits_with_2():
    assert CliRunner().invoke(app, ["demonstrate"]).exit_code == 2
