"""What a wheel and an editable install put where: ``devconv`` and ``devconv_*`` at the top level, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import editables
import pytest

from devconv import __version__ as VERSION

pytestmark = [pytest.mark.lane("cpu"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BACKENDS = sorted(folder.name for folder in (ROOT / "backends").iterdir() if (folder / "__init__.py").exists())
PACKAGES = {"devconv", *BACKENDS}

# Names that an install of this repository could leak.
OUTSIDE = ["backends", "tests", "ci", "noxfile", "docs", "conftest"]


def run(*command, cwd):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, source, target):
    """Call the build backend's hook as pip would, in a process that has hatchling."""
    code = f"import hatchling.build as b; print(b.build_{kind}({str(target)!r}))"
    return target / run(sys.executable, "-c", code, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def editable(tmp_path_factory):
    return build("editable", ROOT, tmp_path_factory.mktemp("editable"))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request, tmp_path_factory):
    """The interpreter of an environment that has devconv, and no torch."""
    folder = tmp_path_factory.mktemp(f"env-{request.param}")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile")
    run(*pip, request.getfixturevalue(request.param), cwd=folder)
    if request.param == "editable":
        # The one requirement of an editable install at run time.
        site = next(folder.glob("lib/python*/site-packages"))
        shutil.copytree(Path(editables.__file__).parent, site / "editables")
    return python


def names(archive):
    return zipfile.ZipFile(archive).namelist()


def test_wheel_holds_our_packages_at_the_top_level_and_nothing_else(wheel):
    top = {name.split("/")[0] for name in names(wheel)}
    assert top == {*PACKAGES, f"devconv-{VERSION}.dist-info"}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_wheel_holds_every_source_of_the_package(wheel, package):
    home = ROOT / ("devconv" if package == "devconv" else f"backends/{package}")
    sources = {f"{package}/{path.relative_to(home)}" for path in home.rglob("*.py")}
    assert sources <= set(names(wheel))


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_wheel_says_that_the_package_is_typed(wheel, package):
    assert f"{package}/py.typed" in names(wheel)


def test_wheel_carries_the_licence(wheel):
    assert f"devconv-{VERSION}.dist-info/licenses/LICENSE" in names(wheel)


def test_source_archive_builds_the_same_wheel(wheel, tmp_path):
    archive = build("sdist", ROOT, tmp_path)
    with tarfile.open(archive) as source:
        source.extractall(tmp_path / "source", filter="data")
    again = build("wheel", tmp_path / "source" / f"devconv-{VERSION}", tmp_path)
    assert set(names(again)) == set(names(wheel))


def test_every_backend_folder_has_a_package_line_and_an_entry_point():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    entry_points = PROJECT["project"]["entry-points"]["devconv.backends"]
    assert sorted(packages) == sorted(["devconv", *(f"backends/{name}" for name in BACKENDS)])
    assert sorted(value.split(":")[0] for value in entry_points.values()) == BACKENDS


def test_entry_points_have_the_device_type_as_their_name():
    entry_points = PROJECT["project"]["entry-points"]["devconv.backends"]
    assert {name: value.split(":")[0] for name, value in entry_points.items()} == {
        name.removeprefix("devconv_"): name for name in BACKENDS
    }


def test_installed_packages_can_be_imported(installed):
    code = (
        "import importlib.util as u, json, sys; print(json.dumps([u.find_spec(n) is not None for n in sys.argv[1:]]))"
    )
    found = json.loads(run(installed, "-c", code, *sorted(PACKAGES), cwd=installed.parent))
    assert all(found)


def test_installed_repository_leaks_no_other_name(installed):
    code = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n)]))"
    assert json.loads(run(installed, "-c", code, *OUTSIDE, cwd=installed.parent)) == []


def test_installed_backends_have_one_name_each(installed):
    # A second copy under another name would have a registry entry and a state of its own.
    code = (
        "import importlib.util as u\ntry: print(u.find_spec('backends.devconv_xla'))\nexcept ImportError: print(None)"
    )
    assert run(installed, "-c", code, cwd=installed.parent).strip() == "None"


def test_installed_entry_points_are_listed(installed):
    code = (
        "from importlib.metadata import entry_points as e; print(*sorted(x.name for x in e(group='devconv.backends')))"
    )
    listed = run(installed, "-c", code, cwd=installed.parent).split()
    assert listed == sorted(name.removeprefix("devconv_") for name in BACKENDS)


def test_installed_command_is_there(installed):
    assert (installed.parent / "devconv").exists()
