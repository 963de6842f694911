"""Promise: a model spread over several devices comes together, each tensor from where it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import devconv
from tests.moves import device_is_here, named_tensors, same
from tests.zoo import fill

PLACES = {
    "xla": ("cpu", "xla:0", "xla:1"),
    "cuda": ("cpu", "cuda:0"),
    "acme": ("cpu", "acme:0", "acme:1"),
}
TARGETS = [
    pytest.param(PLACES[needs], target, id=f"{needs}-to-{target}")
    for needs in PLACES
    if device_is_here(needs)
    for target in PLACES[needs]
]
DOORS: dict[str, Callable[[nn.Module, str], object]] = {
    "flag": lambda model, target: _by_flag(model, target),
    "convert": lambda model, target: devconv.convert(model, target),
}


def _by_flag(model: nn.Module, target: str) -> None:
    with devconv.registry_conversion():
        model.to(target)


def spread(places: tuple[str, ...]) -> nn.Module:
    """One layer and one buffer on each place; two names for each layer's weight."""
    layers = nn.ModuleList()
    for place in places:
        devconv.prepare(place)
        with torch.device(place):
            layer = nn.Linear(4, 4)
            layer.again = nn.Linear(4, 4)
            layer.again.weight = layer.weight
            layer.register_buffer("table", torch.ones(4))
        layers.append(layer)
    return fill(layers)


every_door = pytest.mark.parametrize("door", DOORS)
every_target = pytest.mark.parametrize(("places", "target"), TARGETS)


@every_target
@every_door
def test_every_tensor_arrives(places: tuple[str, ...], target: str, door: str) -> None:
    model = spread(places)
    before = {key: tensor.detach().cpu().clone() for key, tensor in named_tensors(model)}

    DOORS[door](model, target)

    assert {tensor.device for _, tensor in named_tensors(model)} == {torch.device(target)}
    assert [key for key, tensor in named_tensors(model) if not same(tensor, before[key])] == []


@every_target
@every_door
def test_every_parameter_is_the_object_it_was(places: tuple[str, ...], target: str, door: str) -> None:
    model = spread(places)
    before = dict(model.named_parameters(remove_duplicate=False))

    DOORS[door](model, target)

    after = dict(model.named_parameters(remove_duplicate=False))
    assert [key for key in before if after[key] is not before[key]] == []


@every_target
@every_door
def test_what_is_there_already_is_not_touched(places: tuple[str, ...], target: str, door: str) -> None:
    model = spread(places)
    there = model[places.index(target)]
    before = {key: (id(tensor), tensor._version) for key, tensor in named_tensors(there)}

    DOORS[door](model, target)

    assert {key: (id(tensor), tensor._version) for key, tensor in named_tensors(there)} == before


@every_target
@every_door
def test_the_optimizer_goes_on(places: tuple[str, ...], target: str, door: str) -> None:
    model = spread(places)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = model[1].weight.detach().cpu() - 0.1 * (0.9 * 1 + 1)

    if door == "convert":
        devconv.convert(model, target, optimizers=optimizer)
    else:
        _by_flag(model, target)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    assert torch.allclose(model[1].weight.detach().cpu(), expected)
    assert {state["momentum_buffer"].device for state in optimizer.state.values()} == {torch.device(target)}
