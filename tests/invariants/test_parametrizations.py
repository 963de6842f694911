"""Promise: weights that are computed from parameters stay computed: old and new weight_norm and spectral_norm,
parametrizations, pruning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from tests.moves import Move, close, named_tensors, same
from tests.promises import with_same_objects, with_values
from tests.zoo import train


class Symmetric(nn.Module):
    """A parametrization with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() * self.scale + weight.triu(1).transpose(-1, -2)


def layer() -> nn.Linear:
    made = nn.Linear(4, 4)
    with torch.no_grad():
        made.weight.copy_((torch.arange(16.0).reshape(4, 4) % 5 - 2) / 4)
        made.bias.zero_()
    return made


def _old(function: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return function(layer())


def _pruned_globally() -> nn.Module:
    made = layer()
    prune.global_unstructured([(made, "weight")], pruning_method=prune.L1Unstructured, amount=0.5)
    return made


KINDS: dict[str, Callable[[], nn.Module]] = {
    "old-weight-norm": lambda: _old(weight_norm),
    "old-spectral-norm": lambda: _old(spectral_norm),
    "weight-norm": lambda: parametrizations.weight_norm(layer()),
    "spectral-norm": lambda: parametrizations.spectral_norm(layer()),
    "orthogonal": lambda: parametrizations.orthogonal(layer()),
    "parametrization": lambda: _parametrized(),
    "pruned": lambda: prune.l1_unstructured(layer(), "weight", 0.5),
    "pruned-twice": lambda: prune.random_unstructured(prune.l1_unstructured(layer(), "weight", 0.3), "bias", 1),
    "pruned-globally": _pruned_globally,
}
HARD_FOR = {("orthogonal", torch.bfloat16): "torch's orthogonal map has no bfloat16 kernel"}
every_kind = pytest.mark.parametrize("kind", KINDS)


def _parametrized() -> nn.Module:
    made = layer()
    parametrize.register_parametrization(made, "weight", Symmetric())
    return made


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    last = nn.Linear(4, 2)
    with torch.no_grad():
        last.weight.copy_(torch.arange(8.0).reshape(2, 4) / 8)
        last.bias.zero_()
    return nn.Sequential(KINDS[kind](), nn.Tanh(), last)


def build(move: Move, kind: str) -> nn.Module:
    """Made on the source device, with the numbers of one made on the host."""
    if reason := HARD_FOR.get((kind, move.dtype)):
        pytest.skip(f"not applicable: {reason}")
    if move.source.type == "cpu":
        return model_of(kind)
    if kind.startswith("pruned"):
        pytest.skip("not applicable: pruning derives its weight at once, before the numbers could be written there")
    with torch.device(move.source):
        model = model_of(kind)
    with torch.no_grad():
        for (_, tensor), (_, numbers) in zip(named_tensors(model), named_tensors(model_of(kind)), strict=True):
            try:
                tensor.copy_(numbers)
            except RuntimeError:
                # Registering a parametrization leaves tensors on XLA that cannot be written in place.
                tensor.data = numbers.to(tensor.device)
    return model


@every_kind
def test_it_moves_whole(move: Move, kind: str) -> None:
    model = build(move, kind)
    names = [key for key, _ in named_tensors(model)]

    move(model, route=None)

    assert [key for key, _ in named_tensors(model)] == names
    assert {tensor.device for _, tensor in named_tensors(model)} == {move.device}
    if move.dtype is not torch.bfloat16 or kind != "orthogonal":
        assert (model[0].weight.device, model[0].weight.dtype) == (move.device, move.dtype)


@with_same_objects
@every_kind
def test_its_parameters_are_the_objects_they_were(move: Move, kind: str) -> None:
    model = build(move, kind)
    before = dict(model.named_parameters())

    move(model, route=None)

    assert [key for key, parameter in model.named_parameters() if parameter is not before[key]] == []


@with_values
@every_kind
def test_it_gives_what_it_gave(move: Move, kind: str) -> None:
    model = build(move, kind).eval()
    expected = model(move.inputs_before(5, 4)).detach()

    move(model, route=None)

    assert close(model(move.inputs(5, 4)), expected, **move.tolerance)


@with_values
@every_kind
def test_it_trains_after_a_forward_before_the_move(move: Move, kind: str) -> None:
    # The derived weight of the old kinds carries a graph to the parameters, whether or not the output is still held.
    model, twin = build(move, kind), model_of(kind)
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), 0.05)
        train(each, optimizer, range(1))
        if each is model:
            move(model, optimizer, route=None)
        train(each, optimizer, range(1, 3))

    for key, tensor in named_tensors(model):
        wanted = dict(named_tensors(twin))[key]
        assert close(tensor, wanted, rtol=max(move.tolerance["rtol"], 1e-3), atol=max(move.tolerance["atol"], 1e-4)), (
            key
        )


@with_values
@every_kind
def test_its_gradients_reach_the_parameters(move: Move, kind: str) -> None:
    model = build(move, kind)

    move(model, route=None)
    model(move.inputs(5, 4)).sum().backward()

    assert [key for key, p in model.named_parameters() if p.grad is None or p.grad.device != move.device] == []


@with_values
@pytest.mark.parametrize("kind", ["old-weight-norm", "old-spectral-norm", "pruned", "pruned-twice"])
def test_the_derived_weight_is_up_to_date_before_the_next_forward(move: Move, kind: str) -> None:
    # Code that looks at layer.weight between the move and the next forward must not see the old one.
    model = build(move, kind)
    expected = move.cast(model[0].weight)

    move(model, route=None)

    assert (model[0].weight.device, model[0].weight.dtype) == (move.device, move.dtype)
    assert close(model[0].weight, expected, **move.tolerance)


@with_values
@pytest.mark.parametrize("kind", ["pruned", "pruned-globally"])
def test_pruning_can_be_made_permanent_afterwards(move: Move, kind: str) -> None:
    model = build(move, kind)
    expected = move.cast(model[0].weight)

    move(model, route=None)
    prune.remove(model[0], "weight")

    assert same(model[0].weight, expected)


@with_values
@pytest.mark.parametrize("kind", ["parametrization", "weight-norm"])
def test_a_parametrization_can_be_removed_afterwards(move: Move, kind: str) -> None:
    model = build(move, kind)
    expected = model[0].weight.detach()

    move(model, route=None)
    parametrize.remove_parametrizations(model[0], "weight")

    assert close(model[0].weight, expected, **move.tolerance)


@with_values
def test_old_weight_norm_can_be_removed_afterwards(move: Move) -> None:
    model = build(move, "old-weight-norm")
    expected = model[0].weight.detach()

    move(model, route=None)
    nn.utils.remove_weight_norm(model[0])

    assert close(model[0].weight, expected, **move.tolerance)
