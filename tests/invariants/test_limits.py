"""What docs/limits.md says is not promised, shown, so that the page stays true. A limit that goes away fails here."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import devconv
from tests.moves import Move, close, same
from tests.promises import from_host, where, with_same_objects, with_values
from tests.zoo import Normed, loss_of, mlp

swapped = where(lambda conversion: conversion.has_values and all(hop.route == "swap" for hop in conversion.hops))


def test_a_plain_buffer_held_outside_the_tree_stays_the_old_one(move: Move) -> None:
    model = move.build(Normed)
    held = model.table

    move(model)

    assert held is not model.table
    assert (held.device, held.dtype) == (move.source, torch.float32)


@with_values
@pytest.mark.parametrize("alias", [Tensor.detach, lambda tensor: tensor.data])
def test_a_detached_alias_is_a_snapshot(move: Move, alias: object) -> None:
    model = move.build(mlp)
    held = alias(model[0].weight)  # type: ignore[operator]
    value = held.cpu().clone()

    move(model, route=None)
    with torch.no_grad():
        model[0].weight.zero_()

    assert held.device == move.source
    assert same(held, value)


@with_same_objects
@with_values
def test_autograd_grad_through_an_older_graph_raises(move: Move) -> None:
    model = move.build(mlp)
    loss = loss_of(model, 0)

    move(model, route=None)

    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, list(model.parameters()))


@with_same_objects
@with_values
def test_backward_with_inputs_through_an_older_graph_gives_nothing(move: Move) -> None:
    model = move.build(mlp)
    loss = loss_of(model, 0)

    move(model, route=None)
    loss.backward(inputs=list(model.parameters()))

    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


@swapped
def test_a_multi_grad_hook_of_an_older_graph_sees_the_old_device(move: Move) -> None:
    model = move.build(mlp)
    seen: list[tuple[torch.device, torch.dtype]] = []
    register_multi_grad_hook(
        list(model.parameters()), lambda grads: seen.extend((g.device, g.dtype) for g in grads if g is not None)
    )
    loss = loss_of(model, 0)

    move(model, route=None)
    loss.backward()

    assert set(seen) == {(move.source, torch.float32)}


@where(lambda conversion: conversion.device.type == "xla" and conversion.source == "cpu")
def test_transposed_strides_do_not_survive_on_xla(move: Move) -> None:
    layer = nn.Linear(4, 2, bias=False)
    layer.weight = nn.Parameter(torch.arange(8.0).reshape(4, 2).t())

    move(layer)

    assert layer.weight.is_contiguous()
    assert close(layer.weight, torch.arange(8.0).reshape(4, 2).t())


@where(lambda conversion: conversion.device.type == "xla" and conversion.source == "cpu")
def test_deepcopy_on_xla_takes_a_view_group_apart(move: Move) -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("row", model.weight.detach()[0])

    move(model, route=None)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.fill_(3)

    assert not close(twin.row, torch.full((4,), 3.0))


@from_host
def test_a_function_that_works_in_place_is_not_rolled_back(move: Move) -> None:
    model = move.build(mlp)
    calls: list[Tensor] = []

    def zero_two(tensor: Tensor) -> Tensor:
        if len(calls) == 2:
            raise ValueError("the third")
        calls.append(tensor)
        return tensor.zero_()

    with pytest.raises(ValueError, match="the third"):
        move.apply(model, zero_two)

    assert float(model[0].weight.abs().sum()) == 0.0


def test_every_limit_of_the_page_is_about_something_that_is_tested() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "limits.md").read_text()

    for word in (
        "buffer held",
        "snapshots",
        "autograd.grad",
        "backward(inputs=",
        "Multi-grad",
        "no strides",
        "deepcopy",
        "in place",
    ):
        assert word in page, word


@swapped
def test_a_multi_grad_hook_on_parameters_stays_with_the_graphs_from_before(move: Move) -> None:
    model = move.build(mlp)
    fired: list[int] = []
    handle = register_multi_grad_hook(tuple(model.parameters()), lambda gradients: fired.append(len(gradients)))

    move(model, route=None)
    loss_of(model, 0).backward()

    assert fired == []
    handle.remove()


@swapped
def test_a_tensor_as_learning_rate_is_a_new_tensor_on_the_new_device(move: Move) -> None:
    if move.source == move.device:
        pytest.skip("not applicable: it is on the same device")
    model = move.build(mlp)
    rate = torch.tensor(0.5, device=move.source)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    move(model, optimizer, route=None)
    if move.by_devconv:
        devconv.follow(optimizer)

    assert optimizer.param_groups[0]["lr"].device == move.device
    assert optimizer.param_groups[0]["lr"] is not rate
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


@with_values
def test_views_of_one_storage_in_several_dtypes_come_apart(move: Move) -> None:
    model = nn.Module()
    model.number = nn.Parameter(torch.zeros(2, dtype=torch.int32, device=move.source), requires_grad=False)
    model.register_buffer("real", model.number.detach().view(torch.float32))

    move(model, route=None)
    model.number.fill_(1)

    assert not model.real.any()
