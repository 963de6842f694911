"""Promise: tensors of the model that share memory share it afterwards, and have the shapes and strides they had."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import devconv
from tests.moves import Move, close, named_tensors, same
from tests.promises import where, with_same_objects, with_values
from tests.zoo import train

# XLA cannot tell which part of a storage a view covers that was made there: such a model is refused by name. What was
# moved there by devconv is known, and the round trips below bring it back.
pytestmark = where(lambda conversion: not conversion.source.startswith("xla"))


class Flat(nn.Module):
    """Two weights and a bias on one flat parameter's storage, as flattened optimizers lay them out."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.zeros(20), requires_grad=False)
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(4, 2)
        self.first.weight = nn.Parameter(self.flat.detach()[:8].view(2, 4))
        self.first.bias = nn.Parameter(self.flat.detach()[8:10])
        self.second.weight = nn.Parameter(self.flat.detach()[10:18].view(2, 4))
        self.second.bias = nn.Parameter(self.flat.detach()[18:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) + self.second(x)


class FlatOutside(Flat):
    """The same without the flat parameter: only the pieces are in the model."""

    def __init__(self) -> None:
        super().__init__()
        del self.flat


class Transposed(nn.Module):
    """A decoder whose weight is the encoder's, transposed, on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 2)
        self.decoder = nn.Linear(2, 4)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().t())

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.decoder(self.encoder(x)))


class Windowed(nn.Module):
    """Buffers that view a parameter and each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("row", self.layer.weight.detach()[0])
        self.register_buffer("table", torch.zeros(3, 4))
        self.register_buffer("column", self.table[:, 1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table.sum()


class Strided(nn.Module):
    """Expanded, transposed, stepped and offset tensors, each alone on its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.zeros(3, 4).t())
        self.offset = nn.Parameter(torch.zeros(10)[3:7])
        self.register_buffer("expanded", torch.zeros(4, 1).expand(4, 5))
        self.register_buffer("stepped", torch.zeros(10)[::3])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed + self.offset[:3]


SHARING = {"flat": Flat, "flat-outside": FlatOutside, "transposed": Transposed, "windowed": Windowed}
every_sharing_model = pytest.mark.parametrize("name", SHARING)


def build(move: Move, name: str) -> nn.Module:
    """Filled through one name of each storage, so that the values agree."""
    with torch.device(move.source):
        model = SHARING[name]()
    owner = {"flat": "flat", "transposed": "encoder.weight"}.get(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, tensor in named_tensors(model):
            if owner is None or key == owner or key.endswith(("encoder.bias", "decoder.bias")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return model


def shares(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage()._cdata == right.untyped_storage()._cdata


def sharing_pairs(model: nn.Module) -> set[tuple[str, str]]:
    tensors = list(named_tensors(model))
    return {(a, b) for a, left in tensors for b, right in tensors if a < b and shares(left, right)}


@every_sharing_model
def test_what_shared_memory_shares_it(move: Move, name: str) -> None:
    model = build(move, name)
    before = sharing_pairs(model)

    move(model, route=None)

    assert before != set()
    assert sharing_pairs(model) == before


@with_values
@every_sharing_model
def test_every_tensor_of_a_group_keeps_its_value(move: Move, name: str) -> None:
    model = build(move, name)
    expected = move.expected(model)

    move(model, route=None)

    assert [key for key, tensor in named_tensors(model) if not same(tensor, expected[key])] == []


@with_values
@every_sharing_model
def test_a_write_through_one_is_seen_through_the_others(move: Move, name: str) -> None:
    model, twin = build(move, name), build(move, name)
    written = {"flat": "flat", "flat-outside": "first.weight", "transposed": "decoder.weight", "windowed": "table"}[
        name
    ]

    move(model, route=None)
    with torch.no_grad():
        for each in (model, twin):
            dict(named_tensors(each))[written].fill_(0.25)

    expected = {key: move.cast(tensor) for key, tensor in named_tensors(twin)}
    assert [key for key, tensor in named_tensors(model) if not same(tensor, expected[key])] == []


@with_values
def test_an_optimizer_step_on_a_piece_is_seen_in_the_whole(move: Move) -> None:
    model, twin = build(move, "flat"), build(move, "flat")
    train(twin, torch.optim.SGD(twin.first.parameters(), 0.1), range(2))

    move(model, route=None)
    train(model, torch.optim.SGD(model.first.parameters(), 0.1), range(2))

    assert close(model.flat[:8], model.first.weight.reshape(-1))
    assert close(model.flat, twin.flat, **move.tolerance)


@with_values
def test_a_transposed_tie_trains_as_before(move: Move) -> None:
    model, twin = build(move, "transposed"), build(move, "transposed")
    train(twin, torch.optim.SGD(twin.parameters(), 0.05), range(3))

    move(model, route=None)
    train(model, torch.optim.SGD(model.parameters(), 0.05), range(3))

    assert close(model.decoder.weight, twin.decoder.weight, **move.tolerance)
    assert close(model.decoder.weight.t(), model.encoder.weight)


@with_same_objects
@every_sharing_model
def test_the_parameters_of_a_group_are_the_objects_they_were(move: Move, name: str) -> None:
    model = build(move, name)
    before = dict(model.named_parameters())

    move(model, route=None)

    assert [key for key, parameter in model.named_parameters() if parameter is not before[key]] == []


@every_sharing_model
@where(lambda conversion: conversion.device.type in ("cpu", "meta", "cuda"))
def test_strides_and_offsets_of_a_group_are_what_they_were(move: Move, name: str) -> None:
    model, reference = build(move, name), SHARING[name]()
    # Born on the host: a device without strides does not remember its own.
    before = {key: (tensor.shape, tensor.stride()) for key, tensor in named_tensors(reference)}

    move(model, route=None)

    assert {key: (tensor.shape, tensor.stride()) for key, tensor in named_tensors(model)} == before


@where(lambda conversion: conversion.source == "cpu" and conversion.device.type in ("cpu", "meta", "cuda"))
def test_strides_of_a_tensor_alone_are_what_they_were(move: Move) -> None:
    model = Strided()
    before = {key: tensor.stride() for key, tensor in named_tensors(model)}
    stock = Strided()
    for hop in move.conversion.hops:
        stock.to(device=hop.device, dtype=hop.dtype)

    move(model)

    after = {key: tensor.stride() for key, tensor in named_tensors(model)}
    reference = {key: tensor.stride() for key, tensor in named_tensors(stock)}
    assert all(after[key] in (before[key], reference[key]) for key in before)


@with_values
def test_values_of_strided_and_expanded_tensors_are_kept(move: Move) -> None:
    with torch.device(move.source):
        model = Strided()
    with torch.no_grad():
        model.transposed.copy_(torch.arange(12.0).reshape(4, 3))
        model.offset.copy_(torch.arange(4.0))
    expected = move.expected(model)

    move(model)

    assert [key for key, tensor in named_tensors(model) if not same(tensor, expected[key])] == []


@where(lambda conversion: conversion.source == "cpu")
def test_a_piece_of_a_large_storage_does_not_bring_the_rest_along(move: Move) -> None:
    large = torch.zeros(100_000)
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(large[100:108].view(2, 4))
    model.register_buffer("neighbour", large[104:112])

    move(model, route=None)

    if move.device.type in ("cpu", "cuda"):
        assert model.weight.untyped_storage().nbytes() <= 4096
    assert shares(model.weight, model.neighbour)


@where(lambda conversion: conversion.source == "cpu" and not conversion.future)
@every_sharing_model
def test_a_group_goes_by_meta_and_to_empty(move: Move, name: str) -> None:
    if move.mode != "flag" or move.conversion.name != "cpu-meta":
        pytest.skip("not applicable: to_empty is nn.Module's own door")
    model = build(move, name)
    before = sharing_pairs(model)

    move(model, route=None)
    with devconv.registry_conversion():
        model.to_empty(device="cpu")

    assert sharing_pairs(model) == before
    assert {tensor.device.type for _, tensor in named_tensors(model)} == {"cpu"}


@with_values
def test_a_group_survives_a_deepcopy_on_the_target_of_a_conversion(move: Move) -> None:
    if move.device.type == "xla":
        pytest.skip("not applicable: torch's deepcopy un-aliases on XLA")
    model = build(move, "windowed")

    move(model, route=None)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.table.fill_(3)

    assert close(twin.column, torch.full((3,), 3.0))
    assert not close(model.column, torch.full((3,), 3.0))


@where(lambda conversion: conversion.name == "float64")
def test_a_function_that_looks_at_the_tensor_is_asked_for_each(move: Move) -> None:
    # One conversion of the flat storage would have missed the condition for every piece.
    model = build(move, "flat")

    move.apply(model, lambda tensor: tensor.half() if tensor.dim() == 2 else tensor)

    assert model.first.weight.dtype is torch.float16
    assert model.second.weight.dtype is torch.float16
    assert model.first.bias.dtype is torch.float32


@with_values
def test_gradients_that_share_memory_share_it(move: Move) -> None:
    model = move.build(lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)))
    with torch.device(move.source):
        flat = torch.arange(12.0)
        model[0].weight.grad, model[1].weight.grad = flat[:8].view(2, 4), flat[8:].view(2, 2)
    del flat

    move(model, route=None)

    assert shares(model[0].weight.grad, model[1].weight.grad)
    assert same(model[1].weight.grad, torch.arange(8.0, 12.0, dtype=move.dtype).view(2, 2))


@where(lambda conversion: len(conversion.hops) == 1 and conversion.has_values)
def test_a_group_comes_home_with_its_strides(move: Move) -> None:
    if not move.by_devconv or move.conversion.keeps_device or move.source.type != "cpu":
        pytest.skip("not applicable: it never left the host")
    model = build(move, "windowed")
    before = {key: (tensor.stride(), tensor.storage_offset()) for key, tensor in named_tensors(model)}
    pairs = sharing_pairs(model)

    move(model, route=None)
    devconv.convert(model, "cpu")

    assert {key: (tensor.stride(), tensor.storage_offset()) for key, tensor in named_tensors(model)} == before
    assert sharing_pairs(model) == pairs
