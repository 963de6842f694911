"""Importing devconv changes nothing, and every name that it offers is there. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module, metadata

import pytest

import devconv

pytestmark = pytest.mark.lane("cpu", "xla")


def run(code):
    """What a new interpreter prints for `code`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


EVERY_NAME = "import devconv; [getattr(devconv, name) for name in dir(devconv)]; "


@pytest.mark.parametrize("code", ["import devconv; ", EVERY_NAME], ids=["import", "every name"])
def test_devconv_loads_no_backend_and_no_vendor(code):
    loaded = run(code + "import sys; print([m for m in sys.modules if m.startswith(('devconv_', 'torch_xla', 'jax'))])")
    assert loaded == "[]"


@pytest.mark.parametrize("code", ["import devconv; ", EVERY_NAME], ids=["import", "every name"])
def test_devconv_leaves_torch_as_it_was(code):
    state = "(nn.Module._apply, nn.Module.to, torch.Tensor.to, len(optimizer._global_optimizer_pre_hooks))"
    kept = run(
        f"import torch; from torch import nn; from torch.optim import optimizer; before = {state}; {code}"
        f"after = {state}; print(all(a is b for a, b in zip(before, after)))"
    )
    assert kept == "True"


def test_devconv_alone_loads_not_even_torch():
    assert run("import devconv, sys; print('torch' in sys.modules)") == "False"


def test_pytest_plugin_loads_not_even_torch():
    # pytest loads it in every project of an environment that has devconv installed.
    (plugin,) = [entry for entry in metadata.entry_points(group="pytest11") if entry.value.startswith("devconv.")]
    assert run(f"import {plugin.module}, sys; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("name", sorted(name for name in devconv.__dir__() if not name.startswith("_")))
def test_public_name_resolves(name):
    assert getattr(devconv, name) is not None


@pytest.mark.parametrize(("name", "home"), sorted(devconv._HOME.items()))
def test_public_name_is_the_one_of_its_home(name, home):
    module = import_module(f"devconv.{home}")
    assert getattr(devconv, name) is getattr(module, name)
    assert name in module.__all__


def test_no_module_has_the_name_of_a_public_function():
    modules = {home for value in devconv._HOME.values() for home in value.split(".")}
    assert not modules & set(devconv._HOME)


def test_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="banana"):
        _ = devconv.banana


def test_version_is_the_distributions():
    assert devconv.__version__ == metadata.version("devconv")
