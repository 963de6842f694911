"""The one table of lanes: which torch each line of the test matrix runs on, with which variables, and what it needs.

Nothing else in the repository names a version of torch for tests. This file imports the standard library only: nox
reads it before anything is installed, and tests/conftest.py before torch is imported.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

__all__ = ["ENVIRONMENTS", "GUIDE", "LANES", "ROOT", "Environment", "Lane", "current", "required"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Environment:
    """A set of packages that several sessions share, installed once under ``.nox/``.

    Attributes:
        name: folder under ``.nox/``.
        packages: requirements, the torch pin first.
        extras: extras of devconv that are installed with it.
        borrows_torch: take the torch that the machine has already, if it sees a device, before installing one.
        base: an environment whose packages, torch among them, this one sees and adds to.
        projects: folders of the repository that are built and installed against the environment's torch.
    """

    name: str
    packages: tuple[str, ...]
    extras: tuple[str, ...] = ("test",)
    borrows_torch: bool = False
    base: str | None = None
    projects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lane:
    """One line of the test matrix: a device type, and the environment and variables its tests run with.

    Attributes:
        name: name of the lane, of its nox session, and of the device type that its tests must find.
        environment: name of a row of ``ENVIRONMENTS``.
        variables: environment variables, set before torch is imported; one that is set already wins.
        tests: arguments for pytest: what is collected.
        missing: why the lane cannot run on this machine, None if it can.
        default: part of a plain ``nox``.
    """

    name: str
    environment: str
    variables: Mapping[str, str] = field(default_factory=dict)
    tests: tuple[str, ...] = ("tests",)
    missing: Callable[[], str | None] = lambda: None
    default: bool = True


def _no_gpu() -> str | None:
    nodes = [Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd")]
    if any(node.exists() for node in nodes) or shutil.which("nvidia-smi"):
        return None
    return "no NVIDIA or AMD GPU: none of /dev/nvidiactl, /dev/dxg, /dev/kfd and nvidia-smi is here"


def _no_vendor() -> str | None:
    if not (ROOT / "tests" / "vendor_acme" / "pyproject.toml").exists():
        return "tests/vendor_acme is not in this checkout"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        return f"no C++ compiler: {compiler!r} is not on PATH, and the lane's device is written in C++ (apt: g++)"
    return None


def _no_xla_wheel() -> str | None:
    if sys.platform == "linux":
        return None
    return f"torch_xla has wheels for Linux only, this is {sys.platform}"


# One thread an operation: the tensors of the tests are small, and two processes on two cores must not fight for them.
_COMMON = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# Two processes, each with a stretch of the tests that the other one shortens from its end: cases that compile the same
# programs stay together.
_TWO_AT_A_TIME = ("-n", "2", "--dist", "worksteal")

GUIDE = "tests/conformance/test_guide.py::test_every_command_of_the_guide_does_what_the_guide_says"

ENVIRONMENTS: Mapping[str, Environment] = {
    row.name: row
    for row in (
        Environment("torch-2.13", ("torch==2.13.0",), ("test", "lint", "types")),
        Environment("xla-2.9", ("torch==2.9.1", "torch_xla==2.9.0"), ("xla", "demo", "test")),
        Environment("cuda", ("torch>=2.9",), borrows_torch=True),
        Environment("acme", ("setuptools>=70.1", "ninja"), (), base="torch-2.13", projects=("tests/vendor_acme",)),
        Environment(
            "jax-2.9",
            # With exact pins for what they need: nothing else installs these packages.
            ("torchax==0.0.13", "jax==0.10.2", "jaxlib==0.10.2", "ml_dtypes==0.6.0", "opt_einsum==3.4.0"),
            (),
            base="xla-2.9",
        ),
        Environment("newest", ("torch>=2.13",)),
    )
}

LANES: Mapping[str, Lane] = {
    row.name: row
    for row in (
        Lane(
            "cpu",
            "torch-2.13",
            _COMMON,
            # The guide is followed in an environment of its own, by `nox -s guide`: two minutes of installing.
            tests=("tests", f"--deselect={GUIDE}", *_TWO_AT_A_TIME),
        ),
        Lane(
            "xla",
            "xla-2.9",
            {**_COMMON, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
            # The rest of the tests runs here by name: `nox -s xla -- tests`.
            tests=("tests/backends/test_devconv_xla.py", "tests/invariants", *_TWO_AT_A_TIME),
            missing=_no_xla_wheel,
        ),
        Lane("cuda", "cuda", _COMMON, missing=_no_gpu),
        Lane(
            "acme",
            "acme",
            _COMMON,
            # What needs no foreign device of a vendor runs in the cpu lane, on the same torch.
            tests=("tests/backends/test_acme.py", "tests/invariants", "-k", "acme"),
            missing=_no_vendor,
            default=False,
        ),
        Lane(
            "jax",
            "jax-2.9",
            {**_COMMON, "JAX_PLATFORMS": "cpu"},
            tests=("tests/backends/test_devconv_jax.py",),
            missing=_no_xla_wheel,
            default=False,
        ),
        Lane("newest", "newest", _COMMON, default=False),
    )
}


def current() -> Lane:
    """The lane that this process runs in: ``DEVCONV_LANE``, or the fullest one that the environment can run."""
    return LANES[os.environ.get("DEVCONV_LANE") or ("xla" if find_spec("torch_xla") else "cpu")]


def required() -> frozenset[str]:
    """The lanes that must not be skipped: ``DEVCONV_REQUIRE``, names with commas between them."""
    names = frozenset(name.strip() for name in os.environ.get("DEVCONV_REQUIRE", "").split(",") if name.strip())
    if unknown := names - LANES.keys():
        raise SystemExit(f"DEVCONV_REQUIRE names no lane: {', '.join(sorted(unknown))} (lanes: {', '.join(LANES)})")
    return names
