"""Hooks that were registered before the move fire after it, once; handles still remove them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..check import promise
from ..expecting import expect_close, expect_equal
from ..lane import Lane, Move
from ..models import batch, mlp, targets
from .grads import loss_of


def _backward(model: nn.Module, move: Move) -> None:
    loss_of(model, move.after(batch()), move.after(targets())).backward()


@promise(
    cure="Leave Backend.in_place at None; if it is, the device's autograd does not run tensor hooks.", needs="autograd"
)
def a_gradient_hook_fires_after_the_move(lane: Lane, move: Move) -> None:
    """A hook registered before the move sees each gradient once, where the parameter is now."""
    model, seen = move.place(mlp()), []
    model[0].weight.register_hook(lambda grad: seen.append(grad.device))
    move(model)
    _backward(model, move)
    expect_equal(seen, [move.device], "devices of the gradients that the hook saw")


@promise(cure="See hooks.a_gradient_hook_fires_after_the_move.", needs="values autograd")
def a_gradient_hook_changes_the_gradient(lane: Lane, move: Move) -> None:
    """What a hook from before the move returns becomes the gradient."""
    model = move.place(mlp())
    model[2].bias.register_hook(lambda grad: grad * 0 + 5)
    move(model)
    _backward(model, move)
    assert model[2].bias.grad is not None
    expect_close(model[2].bias.grad.to("cpu", torch.float32), torch.full((2,), 5.0), "the gradient that the hook made")


@promise(cure="See hooks.a_gradient_hook_fires_after_the_move.", needs="autograd")
def a_hook_after_accumulation_fires_after_the_move(lane: Lane, move: Move) -> None:
    """A post-accumulate hook from before the move gets the parameter itself, once."""
    model, seen = move.place(mlp()), []
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter is model[0].weight))
    move(model)
    _backward(model, move)
    expect_equal(seen, [True], "calls, and whether they got the parameter")


@promise(cure="See hooks.a_gradient_hook_fires_after_the_move.", needs="autograd")
def a_handle_still_removes_its_hook(lane: Lane, move: Move) -> None:
    """The handle from before the move removes the hook after it."""
    model, seen = move.place(mlp()), []
    handles: list[Any] = [
        model[0].weight.register_hook(lambda grad: seen.append("hook")),
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("post")),
    ]
    move(model)
    for handle in handles:
        handle.remove()
    _backward(model, move)
    expect_equal(seen, [], "hooks that fired after their removal")


@promise(cure="See hooks.a_gradient_hook_fires_after_the_move.", needs="autograd")
def a_hook_registered_after_the_move_fires(lane: Lane, move: Move) -> None:
    """Old and new hooks of one parameter fire side by side."""
    model, seen = move.place(mlp()), []
    model[0].weight.register_hook(lambda grad: seen.append("old"))
    move(model)
    model[0].weight.register_hook(lambda grad: seen.append("new"))
    model[0].bias.register_hook(lambda grad: seen.append("only new"))
    _backward(model, move)
    expect_equal(sorted(seen), ["new", "old", "only new"], "hooks that fired")


@promise(cure="Report it to devconv: the module's own hooks must not change.")
def module_hooks_fire_after_the_move(lane: Lane, move: Move) -> None:
    """Forward hooks and forward pre-hooks of modules are still there."""
    model, seen = move.place(mlp()), []
    model[0].register_forward_pre_hook(lambda module, args: seen.append("before"))
    model[0].register_forward_hook(lambda module, args, output: seen.append(str(output.device)))
    move(model)
    with torch.no_grad():
        model(move.after(batch()))
    expect_equal(seen, ["before", str(move.device)], "hooks that fired")


@promise(cure="Support in-place updates on the device inside a backward pass.", needs="values autograd")
def an_optimizer_in_the_backward_pass_works_on(lane: Lane, move: Move) -> None:
    """A step taken in post-accumulate hooks, with a dict keyed by parameter, trains the moved model."""
    model, twin = move.place(mlp()), mlp()
    for each in (model, twin):
        optimizers: dict[Tensor, Any] = {
            parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in each.parameters()
        }

        def step(parameter: Tensor, optimizers: dict[Tensor, Any] = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    move(model)
    _backward(model, move)
    loss_of(twin, batch(), targets()).backward()
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        expect_close(got, wanted, name, move.tolerance)
