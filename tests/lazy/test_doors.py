"""Every door of a module and of a tensor: what is lazy stays lazy, with its target moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

import devconv
from tests.lazy.zoo import KINDS, lazy_net

pytestmark = pytest.mark.usefixtures("flag")

CASTS = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "double": (lambda m: m.double(), torch.float64),
    "to": (lambda m: m.to(torch.float64), torch.float64),
    "type": (lambda m: m.type(torch.float64), torch.float64),
    "lambda": (lambda m: m._apply(lambda t: t.bfloat16() if t.is_floating_point() else t), torch.bfloat16),
}


@pytest.mark.parametrize("door", CASTS)
@pytest.mark.parametrize("name", KINDS)
def test_every_class_through_every_cast(name, door):
    cast, dtype = CASTS[door]
    kind = KINDS[name]
    module = kind.make()
    parameters = dict(module.named_parameters())

    cast(module)

    assert all(parameters[key] is parameter and is_lazy(parameter) for key, parameter in module.named_parameters())
    assert {parameter.data.dtype for parameter in module.parameters()} == {dtype}
    devconv.materialize(module, *kind.inputs(dtype=dtype))
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}


PLACES = {
    "to": lambda m, d: m.to(d),
    "to_empty": lambda m, d: m.to_empty(device=d),
    "lambda": lambda m, d: m._apply(lambda t: t.to(d)),
    "twice": lambda m, d: m.to(d).to(d),
    "meta first": lambda m, d: m.to("meta").to(d),
    "there and back": lambda m, d: m.to(d).to("cpu").to(d),
    "convert": lambda m, d: devconv.convert(m, d),
}


@pytest.mark.parametrize("door", PLACES)
@pytest.mark.parametrize("name", KINDS)
def test_every_class_through_every_move(name, door, other_device):
    kind = KINDS[name]
    module = kind.make()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.tag = "mine"
    if door == "meta first" or (door == "there and back" and other_device.type == "meta"):
        # An ordinary buffer has no values on meta, and could not come back: lazy tensors have none to lose.
        module._buffers.pop("num_batches_tracked", None)
    held = dict(module.named_parameters())

    PLACES[door](module, other_device)

    assert all(held[key] is parameter and is_lazy(parameter) for key, parameter in module.named_parameters())
    assert all(parameter.tag == "mine" for parameter in module.parameters())
    assert {tensor.data.device for tensor in (*module.parameters(), *module.buffers())} == {other_device}


def test_requires_grad_of_a_lazy_model(device):
    model = lazy_net(device)
    model.requires_grad_(False)
    devconv.materialize(model, torch.ones(2, 3, 8, 8))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_requires_grad_can_be_turned_on_again():
    weight = nn.LazyLinear(2).weight
    assert weight.requires_grad_(False) is weight
    assert weight.requires_grad_() is weight
    assert weight.requires_grad


TENSOR_DOORS = {
    "bfloat16": (lambda t: t.bfloat16(), torch.bfloat16),
    "half": (lambda t: t.half(), torch.float16),
    "to": (lambda t: t.to(torch.float64), torch.float64),
    "type": (lambda t: t.type(torch.float64), torch.float64),
}


@pytest.mark.parametrize("door", TENSOR_DOORS)
@pytest.mark.parametrize("key", ["weight", "running_mean"])
def test_a_cast_of_a_lazy_tensor_is_lazy(key, door):
    cast, dtype = TENSOR_DOORS[door]
    tensor = getattr(nn.LazyBatchNorm1d(), key)
    tensor.tag = "mine"
    made = cast(tensor)
    assert type(made) is type(tensor)
    assert (made.data.dtype, made.tag) == (dtype, "mine")
    assert tensor.data.dtype is torch.float32


def test_a_move_of_a_lazy_tensor_is_lazy(other_device):
    made = nn.LazyLinear(2).weight.to(other_device)
    assert is_lazy(made)
    assert made.data.device == other_device


@pytest.mark.parametrize("door", [lambda t: t.to("cpu"), lambda t: t.cpu(), lambda t: t.to("cpu", torch.float64)])
@pytest.mark.parametrize("key", ["weight", "running_mean"])
def test_a_lazy_tensor_leaves_meta_by_its_own_doors_too(key, door):
    # An ordinary tensor cannot: it has values to miss.
    moved = door(getattr(nn.LazyBatchNorm1d(device="meta"), key))
    assert is_lazy(moved)
    assert moved.data.device == torch.device("cpu")


def test_a_function_of_ones_own_brings_a_lazy_model_back_from_meta():
    model = nn.LazyLinear(2, device="meta")
    weight = model.weight
    model._apply(lambda t: t.to("cpu", torch.float64 if t.is_floating_point() else None))
    assert model.weight is weight
    assert (weight.data.device, weight.data.dtype) == (torch.device("cpu"), torch.float64)


def test_a_cast_that_changes_nothing_returns_the_tensor_itself():
    weight = nn.LazyLinear(2).weight
    assert weight.to("cpu") is weight
    assert weight.float() is weight


def test_the_name_of_a_lazy_tensors_type_is_told_as_ever():
    assert nn.LazyLinear(2).weight.type() == "torch.FloatTensor"


def test_other_operations_on_a_lazy_tensor_are_still_refused():
    with pytest.raises(ValueError, match="uninitialized"):
        nn.LazyLinear(2).weight.sum()


def test_ties_of_lazy_tensors_survive_a_move(other_device):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))
    model[1].weight = model[0].weight
    model.to(other_device)
    assert model[0].weight is model[1].weight


def test_sharing_the_memory_of_lazy_tensors_is_refused_by_torch():
    with pytest.raises(RuntimeError, match="share memory"):
        nn.LazyLinear(2).share_memory()


def test_lazy_buffers_stay_lazy_buffers(other_device):
    norm = nn.LazyBatchNorm1d().to(other_device)
    assert isinstance(norm.running_mean, UninitializedBuffer)
    assert norm.running_mean.data.device == other_device
