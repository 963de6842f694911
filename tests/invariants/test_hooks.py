"""Promise: tensor hooks of both kinds, registered before or after, fire once, in order, and can be removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from tests.moves import Move, same
from tests.promises import with_values
from tests.zoo import mlp

REGISTER: dict[str, Callable[[Tensor, Callable[[Tensor], None]], Any]] = {
    "on-gradient": lambda tensor, hook: tensor.register_hook(hook),
    "after-accumulation": lambda tensor, hook: tensor.register_post_accumulate_grad_hook(hook),
}
both_kinds = pytest.mark.parametrize("kind", REGISTER)


def backward(move: Move, model: nn.Module) -> None:
    model(move.inputs(5, 4)).sum().backward()


@both_kinds
def test_a_hook_from_before_fires_once(move: Move, kind: str) -> None:
    model = move.build(mlp)
    fired: list[str] = []
    REGISTER[kind](model[0].weight, lambda _: fired.append("old"))

    move(model)
    backward(move, model)

    assert fired == ["old"]


@both_kinds
def test_a_hook_from_afterwards_fires_once(move: Move, kind: str) -> None:
    model = move.build(mlp)
    fired: list[str] = []

    move(model)
    REGISTER[kind](model[0].weight, lambda _: fired.append("new"))
    backward(move, model)

    assert fired == ["new"]


@both_kinds
def test_old_and_new_hooks_fire_in_the_order_of_registration(move: Move, kind: str) -> None:
    model = move.build(mlp)
    fired: list[str] = []
    REGISTER[kind](model[0].weight, lambda _: fired.append("first"))
    REGISTER[kind](model[0].weight, lambda _: fired.append("second"))

    move(model)
    REGISTER[kind](model[0].weight, lambda _: fired.append("third"))
    backward(move, model)

    assert fired == ["first", "second", "third"]


@both_kinds
def test_a_handle_from_before_still_removes_its_hook(move: Move, kind: str) -> None:
    model = move.build(mlp)
    fired: list[str] = []
    handle = REGISTER[kind](model[0].weight, lambda _: fired.append("removed"))
    REGISTER[kind](model[0].weight, lambda _: fired.append("kept"))

    move(model)
    handle.remove()
    backward(move, model)

    assert fired == ["kept"]


@both_kinds
def test_hooks_of_a_tied_parameter_fire_once(move: Move, kind: str) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    model = move.build(make)
    fired: list[str] = []
    REGISTER[kind](model[0].weight, lambda _: fired.append("tied"))

    move(model)
    backward(move, model)

    assert fired == ["tied"]


def test_a_hook_sees_the_gradient_where_the_parameter_is(move: Move) -> None:
    model = move.build(mlp)
    seen: list[tuple[Any, ...]] = []
    model[0].weight.register_hook(lambda grad: seen.append((grad.device, grad.dtype)))

    move(model)
    backward(move, model)

    assert seen == [(move.device, move.dtype)]


@with_values
def test_what_a_hook_returns_is_the_gradient(move: Move) -> None:
    model = move.build(mlp)
    model[0].weight.register_hook(lambda grad: grad * 0 + 7)

    move(model)
    backward(move, model)

    assert same(model[0].weight.grad, (move.ones(3, 4) * 7).cpu())


def test_an_accumulation_hook_gets_the_models_parameter(move: Move) -> None:
    model = move.build(mlp)
    got: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(got.append)

    move(model)
    backward(move, model)

    assert len(got) == 1
    assert got[0] is model[0].weight


def test_module_hooks_keep_firing(move: Move) -> None:
    model = move.build(mlp)
    fired: list[str] = []
    model[0].register_forward_hook(lambda *_: fired.append("forward"))
    model[0].register_full_backward_hook(lambda *_: fired.append("backward"))

    move(model)
    backward(move, model)

    assert fired == ["forward", "backward"]


@both_kinds
def test_hooks_fire_once_after_a_backward_on_each_side(move: Move, kind: str) -> None:
    # A first backward makes the node that holds the hooks; the move must not leave them on the old one.
    model = move.build(mlp)
    fired: list[str] = []
    REGISTER[kind](model[0].weight, lambda _: fired.append("hook"))
    model(move.inputs_before(5, 4)).sum().backward()

    move(model)
    backward(move, model)

    assert fired == ["hook", "hook"]
