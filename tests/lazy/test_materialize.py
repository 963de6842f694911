"""devconv.materialize: every lazy tensor gets its shape and storage where it was moved to, and nothing is computed."""

from __future__ import annotations

import json
import threading
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

import devconv
from devconv import TensorSpec, materialize
from tests.lazy.zoo import IMAGE, KINDS, lazy_net


@pytest.mark.parametrize("name", KINDS)
def test_every_lazy_class_becomes_its_eager_class(name):
    kind = KINDS[name]
    module = kind.make()

    materialize(module, *(TensorSpec(shape) for shape in kind.shapes))

    eager = kind.eager()
    assert type(module) is type(eager)
    assert repr(module) == repr(eager)
    assert {key: value.shape for key, value in module.state_dict().items()} == {
        key: value.shape for key, value in eager.state_dict().items()
    }
    assert set(module.__dict__) == set(eager.__dict__)


def test_tensors_are_on_the_device_they_were_born_for(device):
    model = lazy_net(device)

    report = materialize(model, TensorSpec(IMAGE))

    assert {tensor.device for tensor in model.state_dict().values()} == {device}
    assert report.complete
    assert model[4].in_features == 144


def test_tensors_are_on_the_device_and_of_the_dtype_they_were_moved_to(other_device):
    model = lazy_net()
    weight = model[4].weight
    devconv.convert(model, other_device, torch.bfloat16)

    materialize(model, TensorSpec(IMAGE, torch.bfloat16))

    assert model[4].weight is weight
    floating = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    assert {(tensor.device, tensor.dtype) for tensor in floating} == {(other_device, torch.bfloat16)}


def test_a_materialised_model_computes(real_device):
    model = lazy_net(real_device)

    materialize(model, TensorSpec(IMAGE))

    assert model(torch.ones(IMAGE, device=real_device)).isfinite().all().item()


def test_the_flag_is_not_needed():
    model = lazy_net()
    materialize(model, TensorSpec(IMAGE))
    assert not devconv.get_registry_conversion()
    assert not any(map(is_lazy, model.parameters()))


class Fork(nn.Module):
    """Says what its lazy layer was called with, and where."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(2)
        self.ran: list[bool] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.ran.append(x.is_meta)
        return self.layer(x if scale is None else x * scale)


def test_the_model_itself_is_never_run():
    model = Fork()
    materialize(model, torch.ones(2, 3))
    assert model.ran == []


def test_generators_are_where_a_dummy_pass_without_dropout_leaves_them():
    torch.manual_seed(3)
    stock = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    stock(torch.ones(2, 3))
    model = nn.Sequential(nn.LazyLinear(4), nn.Dropout(), nn.LazyLinear(2))

    torch.manual_seed(3)
    materialize(model, torch.ones(2, 3))

    assert torch.equal(model[0].weight, stock[0].weight)
    assert torch.equal(model[2].weight, stock[1].weight)


def test_buffers_and_training_mode_stay_as_they_are():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LazyLinear(2))
    model[1].eval()

    materialize(model, torch.full((4, 3), 9.0))

    assert torch.equal(model[0].running_mean, torch.zeros(3))
    assert model[0].num_batches_tracked == 0
    assert model[0].training
    assert not model[1].training


@dataclass
class Batch:
    x: Tensor | TensorSpec
    label: str


class TakesAnything(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.take = take
        self.layer = nn.LazyLinear(2)

    def forward(self, *args, **kwargs):
        return self.layer(self.take(*args, **kwargs))


SPEC = TensorSpec((2, 7))


@pytest.mark.parametrize(
    ("take", "args", "kwargs"),
    [
        (lambda x: x, (torch.ones(2, 7),), {}),
        (lambda x: x, (torch.ones(2, 7, device="meta"),), {}),
        (lambda batch: batch["a"][1][0], ({"a": (0, [SPEC])},), {}),
        (lambda batch: batch.x, (Batch(SPEC, "name"),), {}),
        (lambda batch: batch["x"], (UserDict(x=SPEC),), {}),
        (lambda n, *, x: x[:n], (2,), {"x": SPEC}),
    ],
    ids=["tensor", "meta", "nested", "dataclass", "mapping", "by name"],
)
def test_inputs_may_be_nested_and_need_no_values(take, args, kwargs):
    model = TakesAnything(take)
    materialize(model, *args, **kwargs)
    assert model.layer.weight.shape == (2, 7)


def test_packed_sequences_are_inputs():
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 2, 6), [3, 2])
    model = devconv.lazy.LazyLSTM(4)
    materialize(model, packed)
    assert model.input_size == 6


class OnItsDevice(nn.Module):
    """What a forward pass does with devices, factories and host arithmetic."""

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)
        self.table = torch.ones(4)
        self.lock = threading.Lock()
        self.layer = nn.LazyLinear(4, device=device)
        self.last = nn.LazyLinear(2, device=device)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False), self.lock:
            hidden = self.layer(x)
        hidden = (
            hidden + self.table.to(x.device) + torch.arange(4, device=x.device) + torch.zeros(4, device=self.device)
        )
        rates = torch.linspace(0, 1, 3).tolist()
        count = int(torch.tensor(hidden.shape).prod())
        hidden[0] = torch.arange(4)
        return self.last(hidden.to(self.device).reshape(-1)[: count - count % 4].view(-1, 4) * rates[1])


def test_a_pass_that_asks_for_devices_and_makes_tensors_is_followed(real_device):
    model = OnItsDevice(real_device)
    report = materialize(model, TensorSpec((2, 3)))
    assert report.how == "meta"
    assert model.last.in_features == 4


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layer = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_followed(reentrant):
    model = Checkpointed(reentrant)
    materialize(model, TensorSpec((2, 3)))
    assert model.layer.in_features == 3


def test_a_compiled_model_is_followed_without_compiling():
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["frames"]["total"]
    inner = Fork()
    compiled = torch.compile(inner, backend="eager")
    materialize(compiled, torch.ones(2, 3))
    assert inner.layer.in_features == 3
    assert torch._dynamo.utils.counters["frames"]["total"] == before


def test_plain_tensors_and_modules_in_attributes_are_followed():
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.LazyLinear(4)]
            self.first = self.layers[0]
            self.scale = torch.ones(3)
            self.loose = [nn.Parameter(torch.ones(3))]

        def forward(self, x):
            return self.layers[0](x * self.scale * self.loose[0])

    model = Uses()
    materialize(model, TensorSpec((2, 3)))
    assert model.first is model.layers[0]
    assert model.first.in_features == 3


def test_pre_hooks_that_change_the_input_are_followed():
    model = nn.Sequential(nn.LazyLinear(4))
    model[0].register_forward_pre_hook(lambda module, args: (args[0][:, :2],), prepend=True)
    materialize(model, TensorSpec((2, 3)))
    assert model[0].in_features == 2


def test_a_shared_layer_takes_its_first_call():
    shared = nn.LazyLinear(3)
    model = nn.Sequential(shared, shared)
    materialize(model, TensorSpec((2, 3)))
    assert shared.in_features == 3


def test_tied_lazy_weights_stay_one_tensor():
    # In stock torch the second module fails: it wants to give a shape to a tensor that has one.
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))
    model[1].weight = model[0].weight

    materialize(model, TensorSpec((2, 3)))

    assert model[1].weight is model[0].weight
    assert model[1].bias.shape == (3,)
    assert model[1].in_features == 3


def test_tied_weights_that_do_not_fit_are_an_error():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))
    model[1].weight = model[0].weight
    with pytest.raises(devconv.ShapeInferenceError, match="needs"):
        materialize(model, TensorSpec((2, 5)))


def test_an_optimizer_built_before_trains_the_real_parameters(real_device):
    model = nn.Sequential(nn.LazyLinear(3, device=real_device))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    materialize(model, TensorSpec((2, 5)))
    before = model[0].weight.detach().cpu().clone()
    model(torch.ones(2, 5, device=real_device)).sum().backward()
    optimizer.step()

    assert not torch.equal(model[0].weight.detach().cpu(), before)


def test_a_model_on_several_devices_stays_there(other_device):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2, device=other_device))
    materialize(model, TensorSpec((2, 5)))
    assert model[0].weight.device == torch.device("cpu")
    assert model[1].weight.device == other_device


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.LazyLinear(2)
        self.unused = nn.LazyLinear(2)
        self.plain = nn.Module()
        self.plain.free = nn.parameter.UninitializedParameter()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_layers_that_the_inputs_never_reached_are_named():
    model = Skips()
    report = materialize(model, TensorSpec((2, 5)))
    assert report.unreached == ("unused", "plain.free")
    assert not report.complete
    assert is_lazy(model.unused.weight)


def test_an_unreached_layer_can_be_materialised_later():
    model = Skips()
    materialize(model, TensorSpec((2, 5)))
    model.used, model.unused = model.unused, model.used
    assert materialize(model, TensorSpec((2, 5))).layers == ("used",)


def test_the_report_says_which_tensor_got_which_shape_where(device):
    report = materialize(nn.Sequential(nn.LazyLinear(3, device=device)), TensorSpec((2, 5)))
    weight = report.items[0]
    assert (weight.name, weight.layer, weight.shape) == ("0.weight", "Linear", (3, 5))
    assert (weight.dtype, weight.device, weight.bytes) == ("float32", str(device), 60)
    assert report.bytes == 72
    assert report.layers == ("0",)
    assert json.loads(report.to_json())["items"][1]["name"] == "0.bias"
    assert "0.weight" in str(report)


def test_a_model_without_lazy_layers_is_left_alone():
    class Stops(nn.Linear):
        def forward(self, x):
            raise AssertionError("was run")

    assert materialize(Stops(2, 2), None).how == "nothing"


def test_a_lazy_module_of_ones_own_is_initialised_once():
    calls = []

    class Own(nn.modules.lazy.LazyModuleMixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.parameter.UninitializedParameter()

        def initialize_parameters(self, x):
            calls.append(x.shape)
            with torch.no_grad():
                self.scale.materialize(x.shape[1:], device=x.device)
                self.scale.fill_(2.0)

        def forward(self, x):
            return x * self.scale

    model = Own()
    materialize(model, TensorSpec((2, 5)))
    assert calls == [(2, 5)] * 2  # once on the copy, once on the model
    assert torch.equal(model.scale, torch.full((5,), 2.0))
    assert type(model) is Own


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: materialize(torch.ones(2)), devconv.NotAModuleError),
        (lambda: materialize(lazy_net(), init="gpu"), ValueError),
        (lambda: materialize(lazy_net(), fallback="eager"), ValueError),
        (lambda: TensorSpec((2, -1)), ValueError),
        (lambda: TensorSpec((2, 3), "float32"), TypeError),
        (lambda: TensorSpec((2, 3.5)), TypeError),
    ],
    ids=["no module", "init", "fallback", "negative size", "dtype", "fraction"],
)
def test_wrong_arguments_are_refused(call, error):
    with pytest.raises(error):
        call()
