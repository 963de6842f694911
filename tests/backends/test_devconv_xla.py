"""The XLA backend: its pair of libraries, its runtime, autograd's threads, and whole lists in one call."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from devconv_xla import UNSUPPORTED
from devconv_xla.starting import check_pair, choose_runtime

import devconv

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PJRT_", "CPU_NUM_DEVICES"))}
needs_xla = pytest.mark.needs("xla")


def run(code, **variables):
    """What a new interpreter prints on stdout and stderr for `code`."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=170, check=False, env=CLEAN | variables
    )


@pytest.fixture
def versions(monkeypatch):
    """Pretend versions of torch and torch_xla."""

    def pretend(torch_version, xla_version):
        def version(name):
            if xla_version is None:
                raise metadata.PackageNotFoundError(name)
            return xla_version

        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(metadata, "version", version)

    return pretend


@pytest.mark.parametrize("pair", [("2.9.1", "2.9.0"), ("2.9.0+cu128", "2.9.0"), ("2.9.1", "2.9.0+libtpu")], ids=str)
def test_pair_that_belongs_together_is_taken(versions, pair):
    versions(*pair)
    check_pair()


@pytest.mark.parametrize("pair", [("2.13.0+cpu", "2.9.0"), ("2.9.1", "2.8.1"), ("2.10.0", "2.9.0")], ids=str)
def test_wrong_pair_is_refused_with_both_versions_and_the_cure(versions, pair):
    versions(*pair)
    with pytest.raises(devconv.BackendLoadError) as caught:
        check_pair()
    message = str(caught.value)
    assert all(version in message for version in pair)
    assert 'pip install "torch==2.9.*" "torch_xla==2.9.0"' in message


def test_missing_torch_xla_says_what_to_install(versions):
    versions("2.13.0", None)
    with pytest.raises(devconv.UnavailableDeviceError, match=r'pip install "torch==2\.9\.\*" "torch_xla==2\.9\.0"'):
        check_pair()


@pytest.mark.lane("cpu")
def test_device_is_unavailable_where_torch_xla_is_not_installed():
    with pytest.raises(devconv.UnavailableDeviceError, match="torch_xla is not installed"):
        devconv.resolve("xla")


@pytest.mark.parametrize("chosen", [{"PJRT_DEVICE": "TPU"}, {"PJRT_SELECT_DEFAULT_DEVICE": "0"}], ids=str)
def test_runtime_that_somebody_chose_stays_chosen(monkeypatch, chosen):
    for name in ("PJRT_DEVICE", "PJRT_SELECT_DEFAULT_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    choose_runtime()
    assert os.environ.get("PJRT_DEVICE") == chosen.get("PJRT_DEVICE")


@needs_xla
def test_cpu_runtime_is_taken_without_a_word_where_none_is_named():
    done = run("import devconv; device, backend = devconv.resolve('xla'); print(device, backend.device_count())")
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("xla:0 1", "", 0)


@needs_xla
def test_runtime_that_is_not_there_is_unavailable_and_named():
    done = run(
        "import devconv\ntry: devconv.resolve('xla')\nexcept devconv.UnavailableDeviceError as error: print(error)\n",
        PJRT_DEVICE="banana",
    )
    assert "PJRT_DEVICE=banana does not start" in done.stdout
    assert "Set PJRT_DEVICE" in done.stdout


TRAIN = """
import threading, warnings
import torch, devconv

def loss_after_steps(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = devconv.convert(model, device) and model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(6.0).reshape(2, 3).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(inputs) ** 2).mean()
        loss.backward()
        optimizer.step()
    return loss.item()
"""


@needs_xla
def test_first_use_inside_inference_mode_is_no_failure():
    done = run(
        "import devconv, torch\nwith torch.inference_mode(): print(devconv.resolve('xla')[0])", PJRT_DEVICE="CPU"
    )
    assert (done.stdout.strip(), done.returncode) == ("xla:0", 0), done.stderr


@needs_xla
def test_first_use_inside_inference_mode_leaves_the_repair_to_the_next_move():
    code = TRAIN + (
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "with torch.inference_mode(): devconv.resolve('xla')\n"
        "wanted, found = loss_after_steps('cpu'), loss_after_steps('xla')\n"
        "print(abs(found - wanted) < 1e-5 * abs(wanted))\n"
    )
    done = run(code, PJRT_DEVICE="CPU")
    assert done.stdout.split() == ["True"], done.stderr


@needs_xla
def test_backward_before_the_runtime_is_repaired_with_one_warning():
    code = TRAIN + (
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "wanted = loss_after_steps('cpu')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    found = [loss_after_steps('xla')]\n"
        "    found.append(loss_after_steps('xla'))\n"
        "    worker = threading.Thread(target=lambda: found.append(loss_after_steps('xla')))\n"
        "    worker.start(); worker.join(120)\n"
        "texts = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]\n"
        "print(len(texts), 'devconv.prepare(\"xla\")' in texts[0])\n"
        "print([abs(loss - wanted) < 1e-5 * abs(wanted) for loss in found])\n"
    )
    done = run(code, PJRT_DEVICE="CPU")
    assert done.stdout.splitlines() == ["1 True", "[True, True, True]"], done.stderr


@needs_xla
def test_backward_after_the_runtime_needs_no_repair_and_no_warning():
    code = TRAIN + (
        "warnings.simplefilter('error', RuntimeWarning)\n"
        "devconv.prepare('xla')\n"
        "wanted, found = loss_after_steps('cpu'), loss_after_steps('xla')\n"
        "print(abs(found - wanted) < 1e-5 * abs(wanted))\n"
    )
    done = run(code, PJRT_DEVICE="CPU")
    assert done.stdout.split() == ["True"], done.stderr


@needs_xla
def test_mesh_counts_as_the_one_device_that_tensors_can_name():
    code = (
        "import torch_xla.runtime as runtime; runtime.use_spmd()\n"
        "import devconv\n"
        "device, backend = devconv.resolve('xla'); print(device, backend.device_count())\n"
        "try: devconv.resolve('xla:1')\n"
        "except devconv.InvalidDeviceError: print('refused')\n"
    )
    done = run(code, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
    assert done.stdout.split() == ["xla:0", "1", "refused"], done.stderr


class Counting:
    """Stands before torch_xla's batched calls and counts them."""

    def __init__(self, real):
        self.real, self.calls = real, []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            return getattr(self.real, name)(*args)

        return call


@pytest.fixture
def counted(monkeypatch):
    backend = devconv.backend_for("xla")
    counting = Counting(backend._xlac)
    monkeypatch.setattr(backend, "_xlac", counting)
    return backend, counting


@needs_xla
def test_list_is_sent_in_one_call(counted):
    backend, counting = counted
    backend.send([torch.ones(index) for index in range(50)], torch.device("xla:0"))
    assert counting.calls == ["_xla_tensors_from_aten"]


@needs_xla
def test_list_is_fetched_in_one_call_for_each_device(counted):
    backend, counting = counted
    first, second = torch.device("xla:0"), torch.device("xla:1")
    there = [
        tensor
        for _ in range(10)
        for tensor in (*backend.send([torch.ones(1)], first), *backend.send([torch.ones(1)], second))
    ]
    counting.calls.clear()
    backend.fetch(there)
    # Both are started before the first is waited for.
    assert counting.calls == ["_xla_sync_multi"] * 2 + ["_xla_get_cpu_tensors"] * 2


@needs_xla
def test_list_crosses_between_devices_in_two_calls(counted):
    backend, counting = counted
    there = backend.send([torch.ones(index) for index in range(50)], torch.device("xla:0"))
    counting.calls.clear()
    backend.copy(there, torch.device("xla:1"))
    assert counting.calls == ["_xla_get_cpu_tensors", "_xla_tensors_from_aten"]


@needs_xla
@pytest.mark.parametrize("dtype", sorted(UNSUPPORTED, key=str), ids=str)
def test_dtype_that_is_called_unsupported_is_so(dtype):
    if dtype.is_floating_point or dtype.is_complex:
        source = torch.zeros(2, dtype=dtype)
    else:
        source = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, dtype)
    with pytest.raises(RuntimeError, match="Type not supported"):
        devconv.backend_for("xla").send([source], torch.device("xla:0"))


@needs_xla
def test_index_of_no_device_is_refused_before_anything_is_touched():
    model = torch.nn.Linear(2, 2)
    weight = model.weight
    with pytest.raises(devconv.InvalidDeviceError, match=r"xla:0 \.\. xla:3"):
        devconv.convert(model, "xla:9")
    assert model.weight is weight
    assert weight.device.type == "cpu"
