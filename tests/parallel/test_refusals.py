"""What cannot be replicated is refused before anything is sent, with the tensor's name and the cure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import devconv
from tests.parallel.models import InPlainList
from tests.zoo import mlp

DOORS = {
    "replicate": lambda model, devices: devconv.replicate(model, devices),
    "DataParallel": lambda model, devices: devconv.DataParallel(model, devices)(torch.ones(4, 4)),
}


@pytest.fixture(params=DOORS)
def door(request):
    return DOORS[request.param]


def test_a_lazy_module_names_its_lazy_tensors_and_the_cure(door):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))

    with pytest.raises(devconv.DevconvError, match=r"1\.weight, 1\.bias.*devconv\.materialize") as caught:
        door(model, ["cpu", "cpu"])

    assert caught.value.names == ("1.weight", "1.bias")


def test_a_lazy_module_is_replicated_after_its_first_forward(door):
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model(torch.ones(2, 4))

    door(model, ["cpu", "cpu"])


def test_a_handle_that_refused_a_lazy_module_works_once_it_has_shapes():
    model = nn.Sequential(nn.LazyLinear(4))
    make = devconv.Replicator(model, ["cpu", "cpu"])
    with pytest.raises(devconv.DevconvError):
        make()

    model(torch.ones(2, 3))

    assert make()[1][0].in_features == 3


def test_a_half_moved_module_names_the_tensor_that_is_elsewhere(door):
    model = mlp()
    model[2].bias = nn.Parameter(torch.ones(2, device="meta"))

    with pytest.raises(devconv.ReplicationRefused) as caught:
        door(model, ["cpu", "cpu"])

    (reason,) = caught.value.reasons
    assert (reason.name, reason.device) == ("2.bias", "meta")
    assert 'model.to("cpu")' in reason.cure


def test_a_module_that_moves_half_way_between_two_calls_is_noticed():
    model = mlp()
    make = devconv.Replicator(model, ["cpu", "cpu"])
    make()

    devconv.convert(model[0], "meta")

    with pytest.raises(devconv.ReplicationRefused, match=r"\d\.weight"):
        make()


def test_a_module_in_a_plain_list_that_stayed_behind_is_named(door):
    model = InPlainList()
    devconv.convert(model, "meta")

    with pytest.raises(devconv.ReplicationRefused, match=r"steps\[1\]\.weight.*nn\.ModuleList"):
        door(model, ["meta", "meta"])


def test_data_parallel_wants_the_module_on_its_first_device():
    parallel = devconv.DataParallel(mlp(), ["cpu", "cpu"])
    devconv.convert(parallel.module, "meta")

    with pytest.raises(
        devconv.ReplicationRefused, match=r"0\.weight \(meta\).*first of the devices is cpu.*\.to\(\"cpu\"\)"
    ):
        parallel(torch.ones(4, 4))


@pytest.mark.needs("xla", 2)
def test_a_module_on_the_host_is_refused_by_data_parallel_on_xla_with_the_cure():
    parallel = devconv.DataParallel(mlp(), ["xla:0", "xla:1"])

    with pytest.raises(devconv.ReplicationRefused, match=r"0\.weight \(cpu\).*\.to\(\"xla:0\"\)"):
        parallel(torch.ones(4, 4))


@pytest.mark.needs("xla", 1)
def test_a_dtype_that_a_device_cannot_hold_is_named():
    model = mlp()
    model[0].register_buffer("half_complex", torch.zeros(1, dtype=torch.complex32))

    with pytest.raises(devconv.ReplicationRefused, match=r"0\.half_complex \(cpu\).*complex32.*xla:0"):
        devconv.replicate(model, ["cpu", "xla:0"])


def test_a_device_that_leaves_a_tensor_behind_is_found_out(monkeypatch):
    backend = devconv.backend_for("meta")
    monkeypatch.setattr(type(backend), "broadcast", lambda self, tensors, devices: [list(tensors) for _ in devices])

    with pytest.raises(devconv.BackendProtocolError, match="arrived on cpu instead of meta"):
        devconv.replicate(mlp(), ["meta"])


def test_a_backend_that_loses_a_tensor_is_found_out(monkeypatch):
    backend = devconv.backend_for("meta")
    monkeypatch.setattr(type(backend), "broadcast", lambda self, tensors, devices: [[] for _ in devices])

    with pytest.raises(devconv.BackendProtocolError, match="returned 0 tensors for the 4"):
        devconv.replicate(mlp(), ["meta"])


def test_a_compiled_module_is_refused_with_the_cure(door):
    model = nn.Sequential(mlp())
    model[0].compile(backend="eager")

    with pytest.raises(devconv.ReplicationRefused, match=r"0 .Sequential.: its compiled code is bound"):
        door(model, ["cpu", "cpu"])


def test_a_module_that_torch_compile_wrapped_is_refused(door):
    with pytest.raises(devconv.ReplicationRefused, match="Replicate the module that was compiled"):
        door(torch.compile(mlp(), backend="eager"), ["cpu", "cpu"])


def test_a_module_that_is_compiled_between_two_calls_is_noticed():
    model = mlp()
    make = devconv.Replicator(model, ["cpu", "cpu"])
    make()

    model[0].compile(backend="eager")

    with pytest.raises(devconv.ReplicationRefused, match=r"0 .Linear."):
        make()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused(door):
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))

    with pytest.raises(devconv.ReplicationRefused, match="TorchScript"):
        door(model, ["cpu", "cpu"])


@pytest.mark.parametrize("make", [devconv.replicate, devconv.Replicator, devconv.DataParallel])
def test_something_that_is_no_module_is_refused(make):
    with pytest.raises(devconv.NotAModuleError):
        make(torch.ones(1), ["cpu"])


@pytest.mark.parametrize("make", [devconv.replicate, devconv.Replicator, devconv.DataParallel])
def test_a_device_that_does_not_exist_is_refused(make):
    with pytest.raises(devconv.InvalidDeviceError, match="cpu:7"):
        make(mlp(), ["cpu", "cpu:7"])


def test_data_parallel_needs_a_device():
    with pytest.raises(ValueError, match="devices is empty"):
        devconv.DataParallel(mlp(), [])
