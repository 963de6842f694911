"""init="host": one seed gives the same values, bit by bit, on every device; init="device" uses the device's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import init

import devconv
from devconv import TensorSpec, materialize
from tests.lazy.zoo import IMAGE, KINDS, lazy_net, values


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_the_eager_class_on_the_host(name, real_device):
    kind = KINDS[name]
    torch.manual_seed(11)
    expected = values(kind.eager())
    module = kind.make(device=real_device)

    torch.manual_seed(11)
    materialize(module, *(TensorSpec(shape) for shape in kind.shapes), init="host")

    got = values(module)
    assert {tensor.device for tensor in module.state_dict().values()} <= {real_device}
    assert all(torch.equal(got[key], expected[key]) for key in expected)


class Initialised(nn.LazyLinear):
    cls_to_become = nn.Linear
    draw = None

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params() and self.in_features > 0:
            type(self).draw(self.weight)
            init.zeros_(self.bias)


@pytest.mark.parametrize(
    "draw",
    [init.xavier_normal_, init.kaiming_uniform_, init.orthogonal_, init.trunc_normal_, lambda w: init.sparse_(w, 0.5)],
    ids=["xavier", "kaiming", "orthogonal", "trunc_normal", "sparse"],
)
def test_computed_initial_values_are_the_same_too(draw, real_device, monkeypatch):
    monkeypatch.setattr(Initialised, "draw", staticmethod(draw))
    torch.manual_seed(1)
    expected = draw(torch.empty(6, 5))
    layer = Initialised(6, device=real_device)

    torch.manual_seed(1)
    materialize(layer, TensorSpec((2, 5)), init="host")

    assert torch.equal(layer.weight.detach().cpu(), expected)


def test_the_objects_are_the_ones_that_were_lazy(real_device):
    model = lazy_net(real_device)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    materialize(model, TensorSpec(IMAGE), init="host")

    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in optimizer.param_groups[0]["params"])


def test_a_model_with_host_values_trains(real_device):
    model = lazy_net(real_device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    materialize(model, TensorSpec(IMAGE), init="host")
    before = values(model)["4.weight"].clone()

    model(torch.randn(IMAGE).to(real_device)).square().sum().backward()
    optimizer.step()

    assert not torch.equal(values(model)["4.weight"], before)


def test_recurrent_layers_have_their_flat_weights(real_device):
    layer = devconv.lazy.LazyLSTM(3, device=real_device)
    materialize(layer, TensorSpec((2, 4, 5)), init="host")
    out, _ = layer(torch.ones(2, 4, 5, device=real_device))
    assert out.isfinite().all().item()


def test_meta_takes_no_values():
    model = lazy_net("meta")
    materialize(model, TensorSpec(IMAGE), init="host")
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_lazy_tensors_on_several_devices_get_host_values_each_on_its_own(other_device):
    torch.manual_seed(2)
    expected = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2, device=other_device))

    torch.manual_seed(2)
    materialize(model, TensorSpec((4, 5)), init="host")

    assert torch.equal(model[0].weight, expected[0].weight)
    assert model[1].weight.device == other_device
