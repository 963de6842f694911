"""docs/vendors.md is true: its commands run as they stand, in an environment and a folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import devconv
from devconv.conformance import catalogue

pytestmark = pytest.mark.timeout(1500)

GUIDE = Path(__file__).parents[2] / "docs" / "vendors.md"
BLOCK = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)
STATUS = re.compile(r"  # exit status (\d)")


def environment(folder: Path) -> dict[str, str]:
    """An environment that has what this one has, and into which `pip install` can write."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    parents = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "parent.pth").write_text("".join(f"import site; site.addsitedir({entry!r})\n" for entry in parents))
    for command in ("pip", "pytest", "devconv"):
        script = folder / "bin" / command
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {command} "$@"\n')
        script.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DEVCONV"))}
    return {
        **clean,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        # What the guide installs is here already, also on a machine without network.
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def blocks() -> list[tuple[str, str, str]]:
    return [(found["language"], found["file"] or "", found["text"]) for found in BLOCK.finditer(GUIDE.read_text())]


@pytest.mark.lane("cpu")
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling, which builds the package, is not installed")
def test_every_command_of_the_guide_does_what_the_guide_says(tmp_path):
    variables = environment(tmp_path / "venv")
    folder = tmp_path / "work"
    folder.mkdir()
    ran = []

    for language, file, text in blocks():
        if file:
            (folder / file).write_text(text)
        if language != "sh":
            continue
        for line in text.splitlines():
            expected = int(found[1]) if (found := STATUS.search(line)) else 0
            ended = subprocess.run(
                ["/bin/sh", "-c", line],
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert ended.returncode == expected, f"{line}\n{ended.stdout}\n{ended.stderr}"
            if line.startswith("cd "):
                folder /= line.removeprefix("cd ")
            ran.append(line)

    assert len(ran) == 11
    assert "roadrunner is not here" in (folder / "report.md").read_text()
    assert (folder / "junit.xml").exists()
    assert (folder / "result.json").exists()


def test_the_guide_counts_the_checks_right():
    assert f"{len(catalogue())} checks in eleven groups" in GUIDE.read_text()
    assert len({check.group for check in catalogue()}) == 11


def test_the_guide_names_every_capability():
    rows = re.findall(r"^\| `(\w+)(?:=\w+)?` \|", GUIDE.read_text(), re.MULTILINE)

    assert set(rows) == set(devconv.Capabilities.__dataclass_fields__)
