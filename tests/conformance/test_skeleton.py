"""`devconv new-backend` starts a package, or says why it does not. docs/vendors.md, which a test runs, goes on from it."""

from __future__ import annotations

import ast
import tomllib

import pytest

from devconv.conformance import SkeletonError, write_skeleton


def test_a_package_is_named_after_its_device(tmp_path):
    written = write_skeleton("red_planet9", tmp_path)

    project = tomllib.loads((tmp_path / "devconv-red_planet9" / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["devconv.backends"] == {
        "red_planet9": "devconv_red_planet9:RedPlanet9Backend"
    }
    assert all(path.is_file() for path in written)
    assert not any("$" in path.read_text() for path in written)


def test_what_is_written_is_python_and_toml(tmp_path):
    for path in write_skeleton("acme", tmp_path):
        if path.suffix == ".py":
            ast.parse(path.read_text())
        if path.suffix == ".toml":
            tomllib.loads(path.read_text())


@pytest.mark.parametrize("name", ["", "Acme", "9lives", "acme-one", "acme:0", "../acme", "a b"])
def test_a_name_that_torch_cannot_read_is_refused(tmp_path, name):
    with pytest.raises(SkeletonError, match="lower-case"):
        write_skeleton(name, tmp_path)

    assert not [*tmp_path.iterdir()]


def test_a_package_that_is_there_is_left_alone(tmp_path):
    (backend,) = [path for path in write_skeleton("acme", tmp_path) if path.name == "__init__.py"]
    backend.write_text("mine")

    with pytest.raises(SkeletonError, match="exists already"):
        write_skeleton("acme", tmp_path)

    assert backend.read_text() == "mine"
