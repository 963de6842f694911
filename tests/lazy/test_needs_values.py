"""A pass that needs values: an error that names module and line, or one real pass that leaves nothing behind."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

import devconv
from devconv import ShapeInferenceError, TensorSpec, materialize


class Gate(nn.Module):
    """Does what it is told with its input, between two lazy layers."""

    def __init__(self, act, device="cpu"):
        super().__init__()
        self.act = act
        self.layer = nn.LazyLinear(3, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.layer(x))


def branch(gate, x):
    return x * 2 if x.sum() > 0 else x


def item(gate, x):
    return x * x.max().item()


def to_numpy(gate, x):
    return torch.as_tensor(np.abs(x.numpy()))


def to_list(gate, x):
    return torch.tensor(x.tolist()).to(x.device)


def nonzero(gate, x):
    return x[x > 0].sum() * x


ACTS = [branch, item, to_numpy, to_list, nonzero]


def model_that(act, device="cpu"):
    return nn.Sequential(nn.LazyLinear(4, device=device), Gate(act, device), nn.LazyLinear(2, device=device))


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_the_error_names_module_and_line(act):
    model = model_that(act)
    with pytest.raises(ShapeInferenceError) as caught:
        materialize(model, TensorSpec((2, 5)))
    line = act.__code__.co_firstlineno + 1
    assert caught.value.module == "1 (Gate)"
    assert caught.value.place.startswith(f"test_needs_values.py:{line}, `")
    assert 'fallback="forward"' in str(caught.value)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_the_error_leaves_every_module_lazy(act):
    model = model_that(act)
    with pytest.raises(ShapeInferenceError):
        materialize(model, TensorSpec((2, 5)))
    assert all(map(is_lazy, model.parameters()))
    assert type(model[0]) is nn.LazyLinear


@pytest.mark.parametrize("act", [branch, item, to_list, nonzero], ids=lambda act: act.__name__)
def test_a_real_pass_finds_the_shapes(act, real_device):
    model = model_that(act, real_device)
    report = materialize(model, TensorSpec((2, 5)), fallback="forward")
    assert report.how == "forward"
    assert [model[0].in_features, model[1].layer.in_features, model[2].in_features] == [5, 4, 3]
    assert {parameter.device for parameter in model.parameters()} == {real_device}


def test_a_real_pass_is_not_run_when_it_is_not_needed():
    assert materialize(nn.LazyLinear(2), TensorSpec((2, 5)), fallback="forward").how == "meta"


class Noisy(nn.Module):
    """Draws from every generator, flips a mode, updates buffers, and then needs a value."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.first = nn.LazyLinear(4, device=device)
        self.norm = nn.LazyBatchNorm1d(device=device)
        self.old = nn.BatchNorm1d(4, device=device)
        self.last = nn.LazyLinear(2, device=device)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.old(self.norm(functional.dropout(self.first(x))))
        random.random()
        np.random.rand()  # noqa: NPY002 - the generator that is to be kept
        self.norm.eval()
        return self.last(hidden) * hidden.sum().item()


def test_a_real_pass_puts_back_buffers_and_training_mode(real_device):
    model = Noisy(real_device)
    materialize(model, torch.randn(8, 5).to(real_device), fallback="forward")
    for norm in (model.norm, model.old):
        assert torch.equal(norm.running_mean.cpu(), torch.zeros(4))
        assert torch.equal(norm.running_var.cpu(), torch.ones(4))
        assert norm.num_batches_tracked.item() == 0
    assert model.norm.training


def test_a_real_pass_draws_the_values_that_following_shapes_draws():
    torch.manual_seed(5)
    followed = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    materialize(followed, TensorSpec((8, 5)))
    after = torch.rand(1)
    torch.manual_seed(5)

    model = Noisy()
    materialize(model, TensorSpec((8, 5)), fallback="forward")

    assert torch.equal(model.first.weight, followed[0].weight)
    assert torch.equal(model.last.weight, followed[1].weight)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("fallback", [None, "forward"])
def test_pythons_and_numpys_generators_are_put_back(fallback):
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the generator that is to be kept
    expected = random.Random(1).random(), np.random.RandomState(1).rand()
    try:
        materialize(Noisy(), TensorSpec((8, 5)), fallback=fallback)
    except ShapeInferenceError:
        assert fallback is None
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002 - the generator that is to be kept


def test_a_real_pass_that_fails_leaves_every_module_lazy():
    def fail(gate, x):
        x.sum().item()
        raise RuntimeError("no such path")

    model = model_that(fail)
    with pytest.raises(RuntimeError, match="no such path"):
        materialize(model, TensorSpec((2, 5)), fallback="forward")
    assert all(map(is_lazy, model.parameters()))


def test_layers_that_the_real_pass_did_not_reach_can_be_reached_later():
    model = model_that(branch)
    model.add_module("aside", nn.LazyLinear(2))
    model.forward = lambda x: model[1](model[0](x))
    report = materialize(model, TensorSpec((2, 5)), fallback="forward")
    assert report.unreached == ("2", "aside")
    assert model[2](torch.ones(2, 3)).shape == (2, 2)


class FromData(nn.modules.lazy.LazyModuleMixin, nn.Module):
    """Initialises itself from the values of its first input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.parameter.UninitializedParameter()

    def initialize_parameters(self, x: Tensor) -> None:
        with torch.no_grad():
            self.scale.materialize(x.shape[1:])
            self.scale.copy_(x.std(0))

    def forward(self, x: Tensor) -> Tensor:
        return x / self.scale


def test_a_module_that_initialises_itself_from_values_is_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(3), FromData())
    with pytest.raises(ShapeInferenceError, match=re.escape("1 (FromData)")):
        materialize(model, TensorSpec((4, 5)))
    assert all(map(is_lazy, model.parameters()))


def test_a_module_that_initialises_itself_from_values_takes_them_from_a_real_pass():
    x = torch.randn(4, 5)
    model = FromData()
    materialize(model, x, fallback="forward")
    assert torch.equal(model.scale, x.std(0))


def test_a_closure_over_the_models_own_layer_is_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(3), nn.Identity())
    first = model[0]
    model[1].forward = lambda x: first(x)
    with pytest.raises(ShapeInferenceError, match="closure"):
        materialize(model, TensorSpec((4, 3)))
    assert all(map(is_lazy, model.parameters()))


def test_wrong_inputs_are_told_as_they_are():
    with pytest.raises(ShapeInferenceError, match=r"mat1 and mat2|reduction dim"):
        materialize(nn.Sequential(nn.LazyLinear(3), nn.Linear(4, 4)), TensorSpec((2, 5)))


def test_a_missing_input_is_told_as_it_is():
    with pytest.raises(ShapeInferenceError, match="missing 1 required positional argument"):
        materialize(nn.LazyLinear(3))


def test_the_error_is_devconvs_and_a_runtime_error():
    with pytest.raises(devconv.DevconvError):
        materialize(model_that(item), TensorSpec((2, 5)))
    with pytest.raises(RuntimeError):
        materialize(model_that(item), TensorSpec((2, 5)))
