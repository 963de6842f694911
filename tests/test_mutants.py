"""The list of mutations applies to the source as it is: each piece stands there exactly once, and its tests exist."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _load() -> object:
    spec = spec_from_file_location("devconv_mutants", ROOT / "ci" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTATIONS = _load().MUTATIONS  # type: ignore[attr-defined]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mechanism)
def test_a_mutation_applies(mutation: object) -> None:
    source = (ROOT / mutation.file).read_text()  # type: ignore[attr-defined]

    assert source.count(mutation.old) == 1  # type: ignore[attr-defined]
    assert mutation.old != mutation.new  # type: ignore[attr-defined]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mechanism)
def test_its_tests_exist(mutation: object) -> None:
    files = [name for name in mutation.tests if name.endswith(".py")]  # type: ignore[attr-defined]

    assert files != []
    assert all((ROOT / name).exists() for name in files)
