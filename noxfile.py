"""Sessions of devconv: one for each lane of ci/lanes.py, and the checks of the source.

``nox`` runs the default ones, ``nox -j 2`` two at a time; ``nox -s cuda xla`` some, ``nox -s cpu -- tests/test_registry.py -k duplicate`` passes
arguments to pytest. A lane without its hardware is skipped and says why; ``DEVCONV_REQUIRE=cuda`` makes that a failure.
Sessions share the environments under ``.nox/``, one for each torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # the console script `nox` does not

from ci.environments import prepare
from ci.lanes import ENVIRONMENTS, GUIDE, LANES, Lane, required

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"
nox.options.sessions = [*(lane.name for lane in LANES.values() if lane.default), "lint", "types", "docs"]
if hasattr(nox.options, "allow_parallel"):
    # A lane keeps one core busy: `nox -j 2` runs two sessions at a time, and shows each when it has ended.
    nox.options.allow_parallel = True

# Where the checks of the source run: they need no device.
SOURCE = ENVIRONMENTS[LANES["cpu"].environment]
TYPED = ("devconv", "backends", "ci", "noxfile.py")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")


def python(session: nox.Session, environment: str = SOURCE.name) -> str:
    """The interpreter of a shared environment, installed first where necessary."""
    try:
        return str(prepare(ENVIRONMENTS[environment]))
    except subprocess.CalledProcessError as error:
        session.error(f"could not install the environment {environment!r}: {error}")


def variables(lane: Lane) -> dict[str, str]:
    """What the lane's processes get; what the caller has set already wins."""
    return {name: os.environ.get(name, value) for name, value in lane.variables.items()} | {"DEVCONV_LANE": lane.name}


def _run_lane(session: nox.Session, lane: Lane) -> None:
    if (reason := lane.missing()) is not None:
        if lane.name in required():
            session.error(f"DEVCONV_REQUIRE={lane.name}, and {reason}")
        session.skip(reason)
    arguments = session.posargs or lane.tests
    session.run(python(session, lane.environment), "-m", "pytest", *arguments, env=variables(lane), external=True)


def _add_lane(lane: Lane) -> None:
    @nox.session(name=lane.name)
    def run(session: nox.Session) -> None:
        _run_lane(session, lane)

    environment = ENVIRONMENTS[lane.environment]
    pins = (ENVIRONMENTS[environment.base] if environment.base else environment).packages
    run.__doc__ = f"The tests on the {lane.name} lane ({', '.join(pins)})."


for _lane in LANES.values():
    _add_lane(_lane)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format, over everything."""
    ruff = (python(session), "-m", "ruff")
    session.run(*ruff, "check", ".", external=True)
    session.run(*ruff, "format", "--check", "--diff", ".", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over the package, the backends and the build."""
    session.run(python(session), "-m", "mypy", *(session.posargs or TYPED), external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Every doctest, and every link between our own pages."""
    interpreter = python(session)
    doctests = ("-m", "pytest", "--doctest-modules", "--doctest-glob=*.md")
    session.run(interpreter, *doctests, "devconv", "backends", *PAGES, env=variables(LANES["cpu"]), external=True)
    session.run(interpreter, "ci/links.py", *PAGES, external=True)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Ratios of conversion, replication and materialisation against stock torch, printed; arguments go to
    ci/bench_conversion.py."""
    lane = LANES["xla"]
    interpreter, environment = python(session, lane.environment), variables(lane)
    session.run(interpreter, "ci/bench_conversion.py", *session.posargs, env=environment, external=True)
    session.run(interpreter, "ci/bench_replicate.py", env=environment, external=True)
    session.run(interpreter, "ci/bench_lazy.py", env=environment, external=True)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Tens of thousands of random conversions on the CPU and on XLA, against twins that are never moved."""
    for lane, examples in (("cpu", "20000"), ("xla", "1000")):
        chosen = {
            "HYPOTHESIS_PROFILE": "fuzz",
            "DEVCONV_FUZZ_EXAMPLES": os.environ.get("DEVCONV_FUZZ_EXAMPLES", examples),
        }
        pytest = (
            python(session, LANES[lane].environment),
            "-m",
            "pytest",
            "--timeout=0",
            "-o",
            "faulthandler_timeout=0",
        )
        arguments = session.posargs or ["tests/fuzz"]
        session.run(*pytest, *arguments, env=variables(LANES[lane]) | chosen, external=True)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Switch off one mechanism at a time; each must be noticed by a test. Arguments: words of mechanisms."""
    for lane in ("cpu", "xla"):
        interpreter = python(session, LANES[lane].environment)
        session.run(interpreter, "ci/mutants.py", lane, *session.posargs, env=variables(LANES[lane]), external=True)


@nox.session(default=False)
def promises(session: nox.Session) -> None:
    """Run every promise by devconv and by stock torch on every lane that can run, and write docs/promises.md."""
    outcomes = []
    for lane in (LANES[name] for name in session.posargs or ("cpu", "xla", "cuda", "acme")):
        if (reason := lane.missing()) is not None:
            session.warn(f"without the {lane.name} lane: {reason}")
            continue
        outcomes.append(f".nox/promises-{lane.name}.jsonl")
        run = (python(session, lane.environment), "ci/promises.py", "run", lane.name, outcomes[-1])
        session.run(*run, env=variables(lane), external=True)
    session.run(python(session), "ci/promises.py", "write", *outcomes, external=True)


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """The real checkpoint trained on XLA, and every optimizer of torch.optim there, through both doors."""
    lane = LANES["xla"]
    environment = variables(lane) | {"DEVCONV_EVERY_OPTIMIZER": "1"}
    tests = session.posargs or ("tests/cli/test_demo.py", "tests/invariants/test_optimizers.py")
    session.run(python(session, lane.environment), "-m", "pytest", *tests, env=environment, external=True)


@nox.session(default=False)
def guide(session: nox.Session) -> None:
    """Follow docs/vendors.md from an empty folder to a green report, each command as it is written there."""
    lane = LANES["cpu"]
    tests = session.posargs or (GUIDE,)
    session.run(python(session, lane.environment), "-m", "pytest", *tests, env=variables(lane), external=True)
