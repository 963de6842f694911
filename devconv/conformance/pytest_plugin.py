"""The options of ``pytest --pyargs devconv.conformance``. Loaded by every pytest where devconv is installed, so it
imports pytest alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["pytest_addoption", "pytest_ignore_collect"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options are declared here and not in a conftest, which is read too late for packages named by ``--pyargs``."""
    group = parser.getgroup("devconv", "conformance of a device's backend (devconv)")
    group.addoption(
        "--devconv-device",
        metavar="TYPE",
        default=os.environ.get("DEVCONV_DEVICE"),
        help="device type that `--pyargs devconv.conformance` examines",
    )
    group.addoption(
        "--devconv-manifest", metavar="FILE", type=Path, help="declared gaps (default: beside the backend's module)"
    )
    group.addoption(
        "--devconv-import",
        metavar="MODULE",
        action="append",
        default=[],
        help="import first, e.g. to register a backend",
    )
    group.addoption(
        "--devconv-stand-in", action="store_true", help="examine the backend on torch's own lazy device, not its own"
    )
    group.addoption(
        "--devconv-timeout", metavar="SECONDS", type=float, default=60.0, help="a check that takes longer has hung"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of devconv's own doctests is no examination of a device."""
    mine = collection_path == Path(__file__).with_name("test_promises.py")
    return True if mine and config.getoption("doctestmodules", False) else None
