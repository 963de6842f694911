"""JAX's devices through torchax: whole lists by copies, models both ways, and what torchax cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref

import devconv_jax
import pytest
import torch
from devconv_jax import JaxBackend
from torch import nn

import devconv

needs_jax = pytest.mark.needs("jax")
DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    torch.bool,
]
COMPLEX = torch.tensor([1 + 2j, 3 - 1j])
LAYOUTS = {
    "0-dim": torch.tensor(3.5),
    "empty with dimensions": torch.empty(2, 0, 3),
    "transposed": torch.arange(24.0).reshape(4, 6).t(),
    "sliced": torch.arange(24.0).reshape(4, 6)[1:3, ::2],
    "expanded": torch.ones(1).expand(5, 5),
    "conjugate": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
    "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    "0-dim bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
    "past 32 bits": torch.tensor([2**40 + 1, -(2**62)]),
}


def run(code, **variables):
    """A new interpreter that has run `code`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={**os.environ, **variables},
    )


def bits(tensor):
    """The bytes of a host tensor: equal where the values are, NaN and -0.0 too."""
    plain = tensor.resolve_conj().resolve_neg().contiguous().flatten()
    return plain.view(torch.uint8).tolist() if tensor.numel() else []


@pytest.fixture
def jax():
    """The first device and its backend."""
    return devconv.resolve("jax:0")


@pytest.fixture
def moves(jax):
    """The device, ready for conversions."""
    devconv.prepare("jax")


class Model(nn.Module):
    """A tie, running statistics with an integer among them, a shared buffer, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))
        self.norm.register_buffer("table", self.table)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x)))) * self.table + self.frozen


def inputs():
    return torch.linspace(-1, 1, 12).reshape(3, 4)


# ---- the libraries ---------------------------------------------------------------------------------------------------


def test_missing_libraries_say_what_to_install(monkeypatch):
    monkeypatch.setattr(devconv_jax, "find_spec", lambda name: None)
    with pytest.raises(devconv.UnavailableDeviceError, match=r'torchax and jax .* pip install "devconv\[jax\]"'):
        JaxBackend().load()


def test_torch_that_torchax_does_not_fit_is_named_with_the_cure(tmp_path):
    # What torchax 0.0.13 does on torch 2.13.
    for name, text in {"torchax": "raise AttributeError('aten.prod has no overload dim_Dimname')", "jax": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "torchax-7.dist-info").mkdir()
    (tmp_path / "torchax-7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torchax\nVersion: 7\n")
    code = (
        "import devconv\nfrom devconv_jax import JaxBackend\n"
        "try: JaxBackend().load()\nexcept devconv.BackendLoadError as error: print(error)"
    )
    done = run(code, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert f"torchax 7 does not fit torch {torch.__version__}: aten.prod has no overload" in done.stdout, done.stderr
    assert 'pip install "devconv[jax]"' in done.stdout


@needs_jax
def test_platform_that_is_not_there_is_unavailable():
    code = "import devconv\ntry: devconv.resolve('jax')\nexcept devconv.UnavailableDeviceError as error: print(error)"
    done = run(code, JAX_PLATFORMS="tpu")
    assert "JAX finds no device" in done.stdout, done.stderr
    assert "Set JAX_PLATFORMS" in done.stdout


@needs_jax
def test_index_of_no_device_is_refused():
    with pytest.raises(devconv.InvalidDeviceError, match="Use jax:0"):
        devconv.resolve("jax:1")


@needs_jax
def test_thread_can_work_with_the_device_once_it_is_prepared(moves):
    seen = []

    def work():
        devconv.prepare("jax")
        seen.append((torch.ones(2, device="jax") + 1).tolist())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(60)
    assert seen == [[2.0, 2.0]]


@needs_jax
def test_seed_repeats_what_is_drawn(jax):
    _, backend = jax
    drawn = []
    for _ in range(2):
        backend.manual_seed(7)
        drawn.append(torch.randn(5, device="jax").tolist())
    assert drawn[0] == drawn[1]


# ---- transfers -------------------------------------------------------------------------------------------------------


@needs_jax
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_comes_back_as_it_was_sent(jax, dtype):
    device, backend = jax
    source = torch.tensor([0, 1, 0, 3]).to(dtype)
    (there,) = backend.send([source], device)
    (back,) = backend.fetch([there])
    assert (there.device, there.dtype) == (device, dtype)
    assert (back.device.type, back.dtype, bits(back)) == ("cpu", dtype, bits(source))


@needs_jax
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_arrives_with_its_shape_and_values(jax, layout):
    device, backend = jax
    source = LAYOUTS[layout]
    (there,) = backend.send([source], device)
    (back,) = backend.fetch(backend.copy([there], device))
    assert there.shape == source.shape == back.shape
    assert bits(back) == bits(source)


@needs_jax
def test_view_on_the_device_is_fetched_with_its_values(jax):
    device, backend = jax
    (base,) = backend.send([torch.arange(6.0)], device)
    assert backend.fetch([base[2:4]])[0].tolist() == [2.0, 3.0]


@needs_jax
@pytest.mark.parametrize("method", ["send", "fetch", "copy"])
def test_each_tensor_is_cast_as_asked(jax, method):
    device, backend = jax
    sources = [torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.int32)]
    dtypes = [torch.bfloat16, torch.float32, torch.int64]
    if method == "send":
        moved = backend.send(sources, device, dtypes=dtypes)
    else:
        there = backend.send(sources, device)
        moved = backend.fetch(there, dtypes=dtypes) if method == "fetch" else backend.copy(there, device, dtypes=dtypes)
    assert [tensor.dtype for tensor in moved] == dtypes
    assert [tensor.tolist() for tensor in moved] == [[1, 1]] * 3


@needs_jax
@pytest.mark.parametrize("length", [3, 4096])
def test_host_and_device_share_no_memory(jax, length):
    # jax.device_put takes the host's memory as its own, and numpy.asarray of an array is JAX's memory.
    device, backend = jax
    source = torch.ones(length)
    (there,) = backend.send([source], device)
    source.fill_(7)
    (back,) = backend.fetch([there])
    back.fill_(9)
    (copied,) = backend.copy([there], device)
    copied.fill_(5)
    assert backend.fetch([there])[0].unique().tolist() == [1.0]


@needs_jax
def test_requires_grad_is_not_copied(jax):
    device, backend = jax
    (there,) = backend.send([torch.ones(2, requires_grad=True)], device)
    assert not there.requires_grad
    assert not backend.fetch([there])[0].requires_grad


class Counting:
    """Stands before the jax module and counts calls of two functions."""

    def __init__(self, real):
        self.real, self.calls = real, []

    def __getattr__(self, name):
        if name in ("device_put", "device_get"):
            self.calls.append(name)
        return getattr(self.real, name)


@needs_jax
def test_lists_cross_in_one_call_each_way(jax, monkeypatch):
    device, backend = jax
    counting = Counting(backend._jax)
    monkeypatch.setattr(backend, "_jax", counting)
    back = backend.fetch(backend.send([torch.full((index,), index) for index in range(50)], device))
    assert counting.calls == ["device_put", "device_get"]
    assert [tensor.tolist() for tensor in back] == [[index] * index for index in range(50)]


# ---- limits ----------------------------------------------------------------------------------------------------------


@needs_jax
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.complex32], ids=str)
def test_dtype_that_jax_would_narrow_is_refused_by_name(moves, dtype):
    model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(2, dtype=dtype))})
    weight = model["weight"]
    with pytest.raises(devconv.ConversionRefused, match=f"weight .*jax cannot hold {dtype}"):
        devconv.convert(model, "jax")
    assert model["weight"] is weight
    assert weight.device.type == "cpu"


@needs_jax
def test_double_precision_arrives_in_jax_own_64_bit_mode(moves):
    code = (
        "import torch, jax, devconv\n"
        "device, backend = devconv.resolve('jax')\n"
        "assert not backend.capabilities.holds(torch.float64)\n"
        "jax.config.update('jax_enable_x64', True)\n"
        "devconv.prepare('jax')\n"
        "(there,) = backend.send([torch.tensor([1 / 3], dtype=torch.float64)], device)\n"
        "print(backend.capabilities.holds(torch.float64), there.dtype, (there * 3).tolist())\n"
    )
    done = run(code)
    assert done.stdout.split("\n")[-2] == "True torch.float64 [1.0]", done.stdout + done.stderr


@needs_jax
def test_autograd_is_declared_missing_since_layers_record_no_graph(jax):
    # Single operations do record one, which makes it worse: the gradient of a model would be a part of it.
    device, backend = jax
    assert not backend.capabilities.autograd
    (weight,) = backend.send([torch.ones(2, 2)], device)
    weight.requires_grad_()
    assert (weight * 2).requires_grad
    assert not nn.functional.linear(weight, weight).requires_grad


@needs_jax
def test_tensor_that_torchax_takes_on_its_way_elsewhere_is_refused(moves):
    # Where torchax is enabled it answers for every device but the CPU.
    model = nn.Linear(2, 2)
    with pytest.raises(devconv.ConversionRefused):
        devconv.convert(model, "meta")
    assert model.weight.device.type == "cpu"


# ---- models ----------------------------------------------------------------------------------------------------------


@needs_jax
@pytest.mark.parametrize("door", ["convert", "flag"])
def test_model_goes_there_and_back_with_its_objects(moves, door):
    def move(model, device):
        if door == "convert":
            return devconv.convert(model, device)
        with devconv.registry_conversion():
            model.to(device)
        return devconv.last_report()

    model = Model().eval()
    wanted, before = model(inputs()).detach(), {name: value.clone() for name, value in model.state_dict().items()}
    objects = dict(model.named_parameters(remove_duplicate=False))
    alive = {name: weakref.ref(parameter) for name, parameter in objects.items()}
    model.first.weight.rank = 3

    there = move(model, "jax")
    routes = {str(item.route) for item in there.items if item.kind == "parameter"}
    on_device = model(inputs().to("jax")).cpu()
    devices = {str(value.device) for value in model.state_dict().values()}
    kept_there = all(parameter is objects[name] for name, parameter in model.named_parameters(remove_duplicate=False))
    move(model, "cpu")

    assert routes == {"swap"}
    assert devices == {"jax:0"}
    assert torch.allclose(on_device, wanted, rtol=1e-5, atol=1e-5)
    assert kept_there
    assert all(parameter is objects[name] for name, parameter in model.named_parameters(remove_duplicate=False))
    assert all(reference() is objects[name] for name, reference in alive.items())
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert vars(model.first.weight) == {"rank": 3}
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].dtype is before[name].dtype and torch.equal(after[name], before[name]) for name in before)


@needs_jax
def test_ties_stay_ties_on_both_sides(moves):
    model = Model()
    for device in ("jax", "cpu"):
        devconv.convert(model, device)
        assert model.second.weight is model.first.weight
        assert model.norm.table is model.table
        assert model.first.weight.device.type == device


@needs_jax
def test_parameters_stay_parameters_with_their_requires_grad(moves):
    model = Model()
    devconv.convert(model, "jax")
    parameters = list(model.parameters())
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_leaf for parameter in parameters)
    assert [parameter.requires_grad for parameter in parameters] == [
        name != "frozen" for name, _ in model.named_parameters()
    ]
    assert model.norm.num_batches_tracked.dtype is torch.int64


@needs_jax
def test_gradients_and_optimizer_state_go_along_and_training_goes_on_at_home(moves):
    torch.manual_seed(0)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), 0.05) for each in (model, twin)]

    def step(each, optimizer):
        optimizer.zero_grad()
        each(inputs()).square().mean().backward()
        optimizer.step()

    for each, optimizer in zip((model, twin), optimizers, strict=True):
        step(each, optimizer)
    grad = model.first.weight.grad
    devconv.convert(model, "jax", optimizers=optimizers[0])
    moment = optimizers[0].state[model.first.weight]["exp_avg"]
    assert (model.first.weight.grad is grad, grad.device.type, moment.device.type) == (True, "jax", "jax")
    devconv.convert(model, "cpu", optimizers=optimizers[0])
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        step(each, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


@needs_jax
def test_checkpoint_of_the_host_loads_into_a_model_on_the_device(moves):
    source, model = Model(), Model()
    devconv.convert(model, "jax")
    weight = model.first.weight
    model.load_state_dict(source.state_dict())
    devconv.convert(model, "cpu")
    assert model.first.weight is weight
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.state_dict().values(), source.state_dict().values(), strict=True)
    )
    # torchax's copy_ brings an integer of 64 bits down to 32, whatever was there before.
    assert model.norm.num_batches_tracked.dtype is torch.int32


@needs_jax
def test_second_move_to_the_device_does_nothing(moves):
    model = Model()
    devconv.convert(model, "jax")
    arrays = [parameter.jax() for parameter in model.parameters()]
    report = devconv.convert(model, "jax")
    assert {str(route) for route in report.routes} <= {"keep"}
    assert all(parameter.jax() is array for parameter, array in zip(model.parameters(), arrays, strict=True))


@needs_jax
def test_cast_on_the_device_changes_the_dtype_of_the_same_objects(moves):
    model = Model()
    devconv.convert(model, "jax")
    weight = model.first.weight
    report = devconv.convert(model, dtype=torch.bfloat16)
    # `parameter.data = tensor` would change the data, and leave the dtype of the TensorImpl as it was.
    assert {str(item.route) for item in report.items if item.kind == "parameter"} == {"swap"}
    assert model.first.weight is weight
    assert weight.dtype is torch.bfloat16
    devconv.convert(model, "cpu")
    assert (weight.dtype, weight.device.type) == (torch.bfloat16, "cpu")


@needs_jax
def test_failure_on_the_way_leaves_the_model_as_it_was(moves, monkeypatch):
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backend = devconv.backend_for("jax")

    def fail(*args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(backend, "_to_numpy", fail)
    with pytest.raises(MemoryError):
        devconv.convert(model, "jax")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@needs_jax
def test_failure_after_the_swaps_takes_classes_and_data_back(moves):
    class Late(nn.RNNBase):
        def _apply(self, fn, recurse=True):
            super()._apply(fn, recurse)
            raise RuntimeError("after everything")

    model = nn.Sequential(nn.Linear(4, 4), Late("GRU", 4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[0].weight
    with pytest.raises(RuntimeError, match="after everything"):
        devconv.convert(model, "jax")
    assert model[0].weight is weight
    assert type(weight) is nn.Parameter
    assert vars(weight) == {}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@needs_jax
def test_lazy_tensors_are_refused_by_name_with_the_cure(moves):
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(devconv.ConversionRefused, match=r"0\.weight .*devconv\.materialize"):
        devconv.convert(model, "jax")
    assert nn.parameter.is_lazy(model[0].weight)


@needs_jax
def test_lazy_model_moves_after_it_was_materialised(moves):
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2))
    weight = model[0].weight
    devconv.materialize(model, inputs())
    devconv.convert(model, "jax")
    assert model[0].weight is weight
    assert tuple(model(inputs().to("jax")).shape) == (3, 2)
