"""`replicate` over a mesh of four XLA devices. SPMD is for a whole process, so each test file's facts come from others."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.lane("xla"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def mesh(on_mesh):
    return on_mesh("trains", "lazy_module")


@pytest.fixture
def trained(mesh):
    return mesh["trains"]


def test_four_devices_train_to_what_one_process_on_the_cpu_trains_to(trained):
    assert trained["size"] == 4
    assert trained["fell"] > 0.1
    assert trained["loss"] < 1e-6
    assert trained["state"] < 1e-6


def test_inputs_are_split_over_the_devices_and_parameters_are_whole_on_each(trained):
    assert trained["inputs"] == ["{devices=[4,1]0,1,2,3}"]
    assert trained["parameters"] == ["{replicated}"]


def test_class_names_and_identity_stay(trained):
    assert trained["same"]


def test_a_module_that_has_not_been_moved_is_refused_with_every_name(trained):
    reasons = trained["before_the_move"]
    assert len(reasons) == 10
    assert reasons[0].startswith("0.weight (cpu): the mesh is one of xla devices.")
    assert 'devconv.convert(module, "xla")' in reasons[0]


def test_inputs_on_the_host_are_refused_before_anything_runs(trained):
    (reason,) = trained["host_inputs"]
    assert reason.startswith("the inputs of the forward pass (cpu)")
    assert 'devconv.move(batch, "xla")' in reason


def test_a_lazy_module_is_marked_once_it_has_shapes(mesh):
    assert mesh["lazy_module"]["mark"] == "{replicated}"
    assert mesh["lazy_module"]["output"] < 1e-6


def test_a_mesh_is_refused_once_the_runtime_has_single_devices_and_those_go_on_working(on_mesh):
    facts = on_mesh("too_late")["too_late"]
    assert "devconv_xla.spmd.start() at the start of the program" in facts["text"]
    assert facts["grad"] == [[3, 3]]
