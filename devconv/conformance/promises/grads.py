"""No gradient is lost, doubled, or left in another dtype or on another device than its parameter."""

from __future__ import annotations

import torch

from ..check import promise
from ..expecting import expect, expect_close, expect_equal
from ..lane import Lane, Move
from ..models import batch, mlp, targets


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    loss: torch.Tensor = ((model(inputs) - wanted) ** 2).mean()
    return loss


def host_grads(passes: int = 1) -> dict[str, torch.Tensor]:
    """The gradients of `mlp` on the host after a number of backward passes."""
    model = mlp()
    for _ in range(passes):
        loss_of(model, batch(), targets()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def expect_grads(model: torch.nn.Module, move: Move, passes: int = 1) -> None:
    """Fail unless every parameter has the host's gradient, in the parameter's own device and dtype."""
    wanted = host_grads(passes)
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            expect(False, f"{name} has no gradient")
            continue
        expect_equal((grad.device, grad.dtype), (parameter.device, parameter.dtype), f"device and dtype of {name}.grad")
        expect_close(grad, wanted[name], f"{name}.grad", move.tolerance)


@promise(
    cure="Treat gradients as tensors like any other in Backend.send(), fetch() and copy().", needs="values autograd"
)
def gradients_move_with_their_parameters(lane: Lane, move: Move) -> None:
    """A gradient that was there before the move is there afterwards, converted like its parameter."""
    model = move.place(mlp())
    loss_of(model, move.before(batch()), move.before(targets())).backward()
    move(model)
    expect_grads(model, move)


@promise(cure="Leave Backend.in_place at None; if it is, report it to devconv.", needs="autograd")
def gradients_stay_the_same_objects(lane: Lane, move: Move) -> None:
    """The tensor in ``.grad`` is the same object afterwards."""
    model = move.place(mlp())
    loss_of(model, move.before(batch()), move.before(targets())).backward()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    move(model)
    for name, parameter in model.named_parameters():
        expect(parameter.grad is before[name], f"{name}.grad is another object afterwards")


@promise(cure="Report it to devconv: a parameter without a gradient must not get one.")
def no_gradient_stays_none(lane: Lane, move: Move) -> None:
    """A parameter without a gradient has none afterwards."""
    model = move.place(mlp())
    move(model)
    have = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    expect_equal(have, [], "parameters that have a gradient now")


@promise(cure="Repair the device's autograd: its backward keys, its device guard, its queues.", needs="values autograd")
def a_backward_pass_after_the_move_is_right(lane: Lane, move: Move) -> None:
    """A new forward and backward pass on the moved model gives the host's gradients."""
    model = move.place(mlp())
    move(model)
    loss_of(model, move.after(batch()), move.after(targets())).backward()
    expect_grads(model, move)


@promise(cure="Support in-place add on the device; autograd accumulates with it.", needs="values autograd")
def gradients_accumulate_across_the_move(lane: Lane, move: Move) -> None:
    """A backward pass before the move and one after it add up."""
    model = move.place(mlp())
    loss_of(model, move.before(batch()), move.before(targets())).backward()
    move(model)
    loss_of(model, move.after(batch()), move.after(targets())).backward()
    expect_grads(model, move, passes=2)


@promise(
    cure="Copy between the devices under autograd (Tensor.to) must work inside a backward pass.",
    needs="values autograd",
)
def a_graph_recorded_before_the_move_delivers(lane: Lane, move: Move) -> None:
    """A loss computed before the move, differentiated after it, gives the parameters their gradients."""
    model = move.place(mlp())
    loss = loss_of(model, move.before(batch()), move.before(targets()))
    move(model)
    loss.backward()
    expect_grads(model, move)


@promise(cure="See grads.a_graph_recorded_before_the_move_delivers; then repair in-place add.", needs="values autograd")
def old_and_new_graphs_add_up(lane: Lane, move: Move) -> None:
    """A graph from before the move and one from after it both reach the same gradient."""
    model = move.place(mlp())
    old = loss_of(model, move.before(batch()), move.before(targets()))
    move(model)
    loss_of(model, move.after(batch()), move.after(targets())).backward()
    old.backward()
    expect_grads(model, move, passes=2)
