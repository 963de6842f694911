"""Environments that sessions share: one folder under ``.nox/`` for each torch, made anew when its pins change."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from ci.lanes import ENVIRONMENTS, ROOT, Environment

__all__ = ["prepare"]

_SOURCES = (".py", ".toml", ".cpp", ".h")
_CONSTRAINTS = ROOT / "ci" / "constraints.txt"

# Run by interpreters that may have a torch: prints what devconv has to know to borrow it.
_PROBE = """
import json, os, sys, sysconfig
import torch
own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
own |= {os.path.join(entry, "lib-dynload") for entry in own}
path = [entry for entry in sys.path if os.path.isdir(entry) and entry not in own]
usable = torch.cuda.is_available() and sys.version_info >= (3, 11)
print(json.dumps({"torch": torch.__version__, "usable": usable, "path": path}))
"""


@dataclass(frozen=True)
class _Donor:
    """An interpreter whose packages another environment sees: of this machine, or of ``.nox/``."""

    python: str
    torch: str
    path: tuple[str, ...]


def prepare(environment: Environment) -> Path:
    """The interpreter of `environment`, installed first where its stamp does not match.

    Returns:
        The interpreter under ``.nox/``.

    Raises:
        subprocess.CalledProcessError: venv or pip failed; its output has been shown.
    """
    donor = None
    if environment.base is not None:
        donor = _base(prepare(ENVIRONMENTS[environment.base]))
    elif environment.borrows_torch:
        donor = _installed(environment)
    folder = ROOT / ".nox" / environment.name
    folder.parent.mkdir(exist_ok=True)
    # Sessions that run at the same time share environments: the first one makes it, the others wait for it.
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _make(environment, folder, donor)


def _make(environment: Environment, folder: Path, donor: _Donor | None) -> Path:
    python = folder / "bin" / "python"
    requirements = _requirements(environment)
    stamp, wanted = folder / "devconv-stamp", _stamp(requirements, environment.projects, donor)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {', '.join(environment.packages)} and what the tests need into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run(donor.python if donor else sys.executable, "-m", "venv", str(folder))
    constraints = ["-c", str(_CONSTRAINTS)]
    if donor is not None:
        # What is there counts as installed; what a machine has may be of other versions than ours.
        constraints = constraints if environment.base else []
        (next(folder.glob("lib/python*/site-packages")) / "borrowed.pth").write_text(
            "".join(f"import site; site.addsitedir({entry!r})\n" for entry in donor.path)
        )
        print(f"with the packages of {donor.python}", flush=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile"]
    _run(*pip, *constraints, *requirements)
    # Build requirements are installed by now (the test extra has ours), so nothing is fetched for the builds.
    build = [*pip, "--no-deps", "--no-build-isolation"]
    if environment.base is None:
        _run(*build, "-e", str(ROOT))
    for project in environment.projects:
        _run(*build, str(ROOT / project))
    stamp.write_text(wanted)
    return python


def _requirements(environment: Environment) -> list[str]:
    """The environment's own pins, and what pyproject.toml asks for with the environment's extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*environment.packages, *(project["dependencies"] if environment.base is None else ())]
    return [*asked, *(requirement for extra in environment.extras for requirement in extras[extra])]


def _stamp(requirements: list[str], projects: tuple[str, ...], donor: _Donor | None) -> str:
    """Changes when a pin, an entry point, a project, an interpreter or the place of the checkout changes."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packaging = [settings["build-system"], settings["project"], settings["tool"]["hatch"]]
    parts = [sys.version, str(ROOT), json.dumps(packaging, sort_keys=True), _CONSTRAINTS.read_text(), *requirements]
    for project in projects:
        files = sorted(path for path in (ROOT / project).rglob("*") if path.suffix in _SOURCES)
        parts += [path.read_text() for path in files if "build" not in path.relative_to(ROOT / project).parts]
    return hashlib.sha256("\n".join([*parts, repr(donor)]).encode()).hexdigest()


def _base(python: Path) -> _Donor:
    """A shared environment as the donor of another; its stamp says when it has been made anew."""
    home = python.parent.parent
    return _Donor(
        str(python), (home / "devconv-stamp").read_text(), (str(next(home.glob("lib/python*/site-packages"))),)
    )


def _installed(environment: Environment) -> _Donor | None:
    wanted = Requirement(environment.packages[0]).specifier
    # sys.executable is nox's own environment, which seldom has a torch; the one that it was made from often has.
    named = [os.environ.get("DEVCONV_PYTHON"), sys.executable, getattr(sys, "_base_executable", None)]
    prefixes = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    found = [shutil.which("python3"), shutil.which("python")]
    candidates = [*named, *(f"{prefix}/bin/python" for prefix in prefixes if prefix), *found]
    for candidate in dict.fromkeys(entry for entry in candidates if entry and Path(entry).exists()):
        # -P: the folder that nox was called in is not to be taken for a package folder.
        probe = subprocess.run(
            [candidate, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False
        )
        if probe.returncode != 0:
            continue
        facts = json.loads(probe.stdout.splitlines()[-1])
        if facts["usable"] and wanted.contains(facts["torch"], prereleases=True):
            return _Donor(candidate, facts["torch"], tuple(facts["path"]))
    return None


def _run(*command: str) -> None:
    # Packages named by PYTHONPATH would count as installed and then be missing in the sessions.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, env=variables, timeout=1800)
