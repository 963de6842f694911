"""Traps of torch's own lazy classes: handled, or told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from devconv import TensorSpec, lazy, materialize
from tests.lazy.zoo import TORCH_KINDS

NORMS = {1: ((4, 5), (2, 4, 5)), 2: ((4, 5, 5), (2, 4, 5, 5)), 3: ((4, 5, 5, 5), (2, 4, 5, 5, 5))}


@pytest.mark.parametrize("home", [nn, lazy], ids=["torch", "devconv"])
@pytest.mark.parametrize("dims", NORMS)
@pytest.mark.parametrize("how", ["forward", "materialize"])
def test_an_unbatched_input_of_an_instance_norm_has_its_channels_first(flag, dims, home, how):
    # Stock torch reads the second dimension, and the layer does not fit its own input.
    norm = getattr(home, f"LazyInstanceNorm{dims}d")(affine=True)
    x = torch.randn(NORMS[dims][0])
    if how == "materialize":
        materialize(norm, x)
    assert norm(x).shape == x.shape
    assert norm.num_features == 4
    assert norm.weight.shape == (4,)


@pytest.mark.parametrize("dims", NORMS)
def test_our_instance_norms_have_the_defaults_of_what_they_become(dims):
    norm = getattr(lazy, f"LazyInstanceNorm{dims}d")()
    eager = getattr(nn, f"InstanceNorm{dims}d")(4)
    norm(torch.randn(NORMS[dims][1]))
    assert repr(norm) == repr(eager)
    assert type(norm) is type(eager)


@pytest.mark.parametrize("dims", NORMS)
def test_our_instance_norms_read_unbatched_inputs_without_the_flag(dims):
    norm = getattr(lazy, f"LazyInstanceNorm{dims}d")(affine=True)
    norm(torch.randn(NORMS[dims][0]))
    assert norm.num_features == 4


def test_the_defaults_of_torchs_lazy_instance_norms_are_told():
    report = materialize(nn.Sequential(nn.LazyInstanceNorm1d()), TensorSpec((2, 4, 5)))
    assert "0: torch's lazy instance norms default to affine=True" in report.notes[0]


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LazyInstanceNorm1d(affine=False, track_running_stats=False),
        lazy.LazyInstanceNorm1d,
        nn.LazyBatchNorm1d,
    ],
)
def test_nothing_is_told_of_norms_without_that_trap(norm):
    assert materialize(norm(), TensorSpec((2, 4, 5))).notes == ()


@pytest.mark.parametrize("how", ["forward", "materialize"])
@pytest.mark.parametrize("cls", [nn.LazyBatchNorm1d, nn.LazyInstanceNorm1d])
def test_a_norm_without_tensors_knows_its_number(flag, cls, how):
    # Stock torch leaves num_features at 0, and an instance norm then warns in every pass.
    norm = cls(affine=False, track_running_stats=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "materialize":
            materialize(norm, TensorSpec((2, 4, 5)))
        norm(torch.randn(2, 4, 5))
    assert norm.num_features == 4


class Doubled(nn.LazyLinear):
    """A subclass that does not say what it becomes: stock torch makes a plain Linear of it."""

    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("how", ["forward", "materialize", "load"])
def test_a_subclass_stays_what_it_is(flag, how):
    layer = Doubled(3)
    if how == "materialize":
        materialize(layer, TensorSpec((2, 5)))
    if how == "load":
        layer.load_state_dict(nn.Linear(5, 3).state_dict())
    out = layer(torch.ones(2, 5))
    assert type(layer) is Doubled
    assert torch.allclose(out, nn.functional.linear(torch.ones(2, 5), layer.weight, layer.bias) * 2)
    assert layer.in_features == 5


def test_a_subclass_that_says_what_it_becomes_becomes_it(flag):
    class Own(nn.LazyLinear):
        cls_to_become = nn.Linear

    layer = Own(3)
    layer(torch.ones(2, 5))
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("name", TORCH_KINDS)
def test_grouped_and_wrong_inputs_leave_a_layer_lazy(flag, name):
    module = TORCH_KINDS[name].make()
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        module(torch.tensor(1.0))
    assert module.has_uninitialized_params()


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (lambda: lazy.LazyLayerNorm(dims=3), (torch.ones(2, 3),), "normalises 3 dimensions"),
        (lambda: lazy.LazyGroupNorm(3), (torch.ones(2, 4),), "divisible"),
        (lambda: lazy.LazyGroupNorm(3), (torch.ones(3),), "GroupNorm takes inputs"),
        (lambda: lazy.LazyLSTM(3), (torch.ones(3),), "2-D or 3-D"),
        (lambda: lazy.LazyMultiheadAttention(3), (torch.ones(2, 2, 4),) * 3, "divisible"),
        (lambda: lazy.LazyMultiheadAttention(2, kdim=4), (torch.ones(2, 2, 4),) * 3, "leave them out"),
        (
            lambda: lazy.LazyMultiheadAttention(2),
            (torch.ones(2, 2, 4), torch.ones(2, 2, 6), torch.ones(2, 2, 4)),
            "give kdim and vdim",
        ),
    ],
)
def test_inputs_that_cannot_be_right_are_told_before_anything_gets_a_shape(flag, make, inputs, message):
    module = make()
    before = repr(module)
    with pytest.raises((ValueError, AssertionError), match=message):
        module(*inputs)
    assert module.has_uninitialized_params()
    assert repr(module) == before
