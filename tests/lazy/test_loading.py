"""Checkpoints in all four directions, whole and partial, copied and assigned, on this device and another."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import devconv
from devconv import LazyCheckpointError, LazyShapeError, TensorSpec, materialize
from tests.lazy.zoo import IMAGE, KINDS, TORCH_KINDS, lazy_net, values
from tests.zoo import fill

pytestmark = pytest.mark.usefixtures("flag")


def full(name):
    """A checkpoint of the eager class, with values that no constructor makes."""
    return fill(KINDS[name].eager(), 4).state_dict()


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("name", KINDS)
def test_a_full_checkpoint_finishes_a_lazy_module_at_once(name, assign):
    module, state = KINDS[name].make(), full(name)
    module.load_state_dict(state, assign=assign)
    eager = KINDS[name].eager()
    assert type(module) is type(eager)
    assert repr(module) == repr(eager)
    assert set(module.__dict__) == set(eager.__dict__)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", KINDS)
def test_a_loaded_module_computes_what_the_saved_one_did(name):
    kind = KINDS[name]
    eager = fill(kind.eager(), 4)
    module = kind.make()
    module.load_state_dict(eager.state_dict())
    x = kind.inputs()
    ours, theirs = module(*x), eager(*x)
    if isinstance(ours, tuple):
        ours, theirs = ours[0], theirs[0]
    assert torch.allclose(ours, theirs)


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize("name", KINDS)
def test_a_cpu_checkpoint_lands_where_the_module_was_moved_to(name, other_device):
    module, state = KINDS[name].make(), full(name)
    devconv.convert(module, other_device)
    parameters = dict(module.named_parameters())

    module.load_state_dict(state)

    assert {tensor.device for tensor in module.state_dict().values()} <= {other_device}
    assert all(parameters[key] is parameter for key, parameter in module.named_parameters())
    if other_device.type != "meta":
        assert all(torch.equal(value, state[key]) for key, value in values(module).items())


def test_a_checkpoint_is_cast_to_the_dtype_that_the_module_was_moved_to():
    layer = nn.LazyLinear(3)
    layer.to(torch.bfloat16)
    layer.load_state_dict(nn.Linear(5, 3).state_dict())
    assert layer.weight.dtype is torch.bfloat16


def test_assigned_tensors_are_sent_to_where_the_lazy_ones_were_moved(other_device):
    # Torch's assign keeps the checkpoint's device: the model that was moved would silently be on the CPU again.
    if other_device.type == "meta":
        pytest.skip("a lazy tensor on meta takes the checkpoint's device, the test below")
    layer, state = nn.LazyLinear(3, device=other_device), nn.Linear(5, 3).state_dict()
    layer.load_state_dict(state, assign=True)
    assert layer.weight.device == other_device
    assert torch.equal(layer.weight.detach().cpu(), state["weight"])


def test_assigned_tensors_make_a_module_on_meta_real():
    layer, state = nn.LazyLinear(3, device="meta"), nn.Linear(5, 3).state_dict()
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer.weight, state["weight"])
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("how", ["forward", "materialize"])
@pytest.mark.parametrize("missing", ["weight", "bias"])
@pytest.mark.parametrize(
    "name", ["LazyLinear", "LazyConv2d", "LazyBatchNorm2d", "LazyInstanceNorm1d", "LazyLayerNorm", "LazyGroupNorm"]
)
def test_a_partial_checkpoint_is_kept_and_the_rest_initialised(name, missing, how):
    kind, state = KINDS[name], full(name)
    del state[missing]
    module = kind.make()
    loaded = module.load_state_dict(state, strict=False)
    assert loaded.missing_keys == [missing]

    if how == "forward":
        module(*kind.inputs())
    else:
        materialize(module, *kind.inputs())

    shapes = {key: value.shape for key, value in module.state_dict().items()}
    assert shapes == {key: value.shape for key, value in kind.eager().state_dict().items()}
    trained = module.training and how == "forward"
    for key, value in state.items():
        if not (trained and ("running" in key or "num_batches" in key)):
            assert torch.equal(module.state_dict()[key], value), key
    assert type(module) is type(kind.eager())


def test_a_partial_checkpoint_on_the_device(real_device):
    layer, state = nn.LazyLinear(3, device=real_device), nn.Linear(5, 3).state_dict()
    layer.load_state_dict({"weight": state["weight"]}, strict=False)
    layer(torch.ones(2, 5, device=real_device))
    assert layer.bias.device == real_device
    assert torch.equal(layer.weight.detach().cpu(), state["weight"])


def test_a_partial_checkpoint_that_does_not_fit_the_input_is_named():
    model = nn.Sequential(nn.LazyLinear(3))
    model.load_state_dict({"0.weight": torch.zeros(3, 5)}, strict=False)
    with pytest.raises(LazyShapeError) as caught:
        model(torch.ones(2, 7))
    assert (caught.value.name, caught.value.loaded, caught.value.needed) == ("0.weight", (3, 5), (3, 7))
    assert is_lazy(model[0].bias)


def test_a_module_of_ones_own_keeps_what_a_partial_checkpoint_brought():
    class Own(nn.modules.lazy.LazyModuleMixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.parameter.UninitializedParameter()
            self.b = nn.parameter.UninitializedParameter()
            self.c = nn.Parameter(torch.ones(2))

        def initialize_parameters(self, x):
            with torch.no_grad():
                for tensor in (self.a, self.b):
                    tensor.materialize(x.shape[1:])
                for tensor in (self.a, self.b, self.c):
                    tensor.zero_()

        def forward(self, x):
            return x * self.a + self.b

    module = Own()
    module.load_state_dict({"a": torch.full((5,), 2.0), "c": torch.full((2,), 3.0)}, strict=False)
    module(torch.ones(2, 5))
    assert torch.equal(module.a, torch.full((5,), 2.0))
    assert torch.equal(module.b, torch.zeros(5))
    assert torch.equal(module.c, torch.full((2,), 3.0))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_lazy_checkpoint_leaves_a_lazy_module_as_it_is(assign, other_device):
    layer = nn.LazyLinear(3, device=other_device, dtype=torch.bfloat16)
    weight = layer.weight
    layer.load_state_dict(nn.LazyLinear(3).state_dict(), assign=assign)
    assert layer.weight is weight
    assert (layer.weight.data.device, layer.weight.data.dtype) == (other_device, torch.bfloat16)
    assert layer(torch.ones(2, 5, device=other_device, dtype=torch.bfloat16)).shape == (2, 3)


def test_a_lazy_checkpoint_into_an_initialised_module_is_refused_before_anything_is_loaded():
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    before = values(model)
    state = nn.Sequential(nn.Linear(5, 3), nn.LazyLinear(2)).state_dict()
    with pytest.raises(LazyCheckpointError) as caught:
        model.load_state_dict(state)
    assert caught.value.names == ("1.weight", "1.bias")
    assert all(torch.equal(value, before[key]) for key, value in values(model).items())


def test_missing_keys_of_a_strict_load_are_still_an_error():
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        nn.LazyLinear(3).load_state_dict({"weight": torch.zeros(3, 5)})


def test_unexpected_keys_of_a_strict_load_are_still_an_error():
    with pytest.raises(RuntimeError, match="Unexpected key"):
        nn.LazyLinear(3, bias=False).load_state_dict(nn.Linear(5, 3).state_dict())


def test_an_optimizer_built_on_lazy_parameters_trains_the_loaded_ones():
    layer = nn.LazyLinear(3)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    layer.load_state_dict(nn.Linear(5, 3).state_dict())
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
def test_a_whole_model_is_finished_by_its_checkpoint(other_device):
    eager = lazy_net()
    materialize(eager, TensorSpec(IMAGE))
    model = lazy_net(other_device)
    model.load_state_dict(eager.state_dict())
    assert not any(isinstance(module, nn.modules.lazy.LazyModuleMixin) for module in model.modules())
    assert (model[0].in_channels, model[1].num_features, model[4].in_features) == (3, 4, 144)


@pytest.mark.parametrize("name", TORCH_KINDS)
def test_a_lazy_module_loads_under_torchs_swap_flag(name):
    module, state = KINDS[name].make(), full(name)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert repr(module) == repr(KINDS[name].eager())
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


def test_tied_lazy_weights_load_as_one():
    model = nn.Sequential(nn.LazyLinear(3, bias=False), nn.LazyLinear(3, bias=False))
    model[1].weight = model[0].weight
    state = {"0.weight": torch.ones(3, 3), "1.weight": torch.ones(3, 3)}
    model.load_state_dict(state)
    assert model[1].weight is model[0].weight
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
