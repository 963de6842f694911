"""An optimizer that was built before the move trains the moved model as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import devconv

from ..check import promise
from ..expecting import expect, expect_close, expect_equal
from ..lane import Lane, Move
from ..models import mlp, steps


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _like_a_twin(lane: Lane, move: Move, make: Callable[[list[Tensor]], Optimizer]) -> None:
    """Three steps, a move, three steps: against six steps on the host."""
    model, twin = move.place(mlp()), mlp()
    optimizer, other = make(list(model.parameters())), make(list(twin.parameters()))
    steps(model, optimizer, move.before, lane)
    move(model, optimizer)
    steps(model, optimizer, move.after, lane)
    steps(twin, other, lambda tensor: tensor, lane, count=6)
    for (name, got), wanted in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        expect_close(got, wanted[1], f"{name} after 3 + 3 steps", 6 * move.tolerance)


@promise(cure="Repair Backend.send(), fetch() and copy(): the momentum moves by them.", needs="values autograd")
def sgd_keeps_its_momentum(lane: Lane, move: Move) -> None:
    """SGD with momentum goes on as a twin that never moved."""
    _like_a_twin(lane, move, lambda parameters: SGD(parameters, lr=0.1, momentum=0.9))


@promise(cure="Repair Backend.send(), fetch() and copy(): both moments move by them.", needs="values autograd")
def adam_keeps_its_moments(lane: Lane, move: Move) -> None:
    """Adam goes on as a twin that never moved."""
    _like_a_twin(lane, move, lambda parameters: Adam(parameters, lr=0.05))


@promise(
    cure="Support the device in torch's foreach operators, or their fall-back, tensor by tensor.",
    needs="values autograd",
)
def adamw_by_foreach_goes_on(lane: Lane, move: Move) -> None:
    """AdamW with ``foreach=True`` goes on as a twin that never moved."""
    _like_a_twin(lane, move, lambda parameters: AdamW(parameters, lr=0.05, foreach=True))


@promise(cure="Repair Backend.send(), fetch() and copy(): the sums move by them.", needs="values autograd")
def adagrad_keeps_its_sums(lane: Lane, move: Move) -> None:
    """Adagrad, whose state exists before the first step, goes on as a twin that never moved."""
    _like_a_twin(lane, move, lambda parameters: Adagrad(parameters, lr=0.1))


@promise(
    cure="Repair Backend.send(), fetch() and copy(): LBFGS keeps lists of tensors, which move too.",
    needs="values autograd",
)
def lbfgs_keeps_its_history(lane: Lane, move: Move) -> None:
    """LBFGS, whose state is lists of tensors, goes on after the move and does not get worse."""
    model = move.place(mlp())
    optimizer = LBFGS(list(model.parameters()), lr=0.1, max_iter=1, history_size=2)
    before = steps(model, optimizer, move.before, lane)
    move(model, optimizer)
    after = steps(model, optimizer, move.after, lane)
    expect(after[-1] <= before[-1] * (1 + move.tolerance), f"losses {before} before, {after} after")
    home = {parameter.device for parameter in model.parameters()}
    state = {tensor.device for tensor in _tensors(optimizer.state) if tensor.dim()}
    expect_equal(state, home, "devices of the history")


@promise(cure="Leave Backend.in_place at None: the optimizer holds the parameter objects.", needs="autograd")
def the_optimizer_holds_the_models_parameters(lane: Lane, move: Move) -> None:
    """The groups of the optimizer hold exactly the parameters of the moved model."""
    model = move.place(mlp())
    optimizer = Adam(model.parameters(), lr=0.1)
    move(model, optimizer)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    expect_equal(held, [id(parameter) for parameter in model.parameters()], "parameters in the optimizer's groups")


@promise(cure="Return tensors of the dtype asked for from Backend.send(), fetch() and copy().", needs="autograd")
def state_is_where_its_parameter_is(lane: Lane, move: Move) -> None:
    """By the next step, what the state holds in the shape of a parameter is on its device, in its dtype."""
    model = move.place(mlp())
    optimizer = Adam(model.parameters(), lr=0.1)
    steps(model, optimizer, move.before, lane, count=1)
    move(model, optimizer)
    steps(model, optimizer, move.after, lane, count=1)
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter].get(key)
            have = None if state is None else (state.device, state.dtype)
            expect_equal(have, (move.device, move.dtype), f"device and dtype of {key} of {name}")


@promise(cure="Nothing to do in the backend: report it to devconv.", needs="values autograd")
def a_scheduler_goes_on(lane: Lane, move: Move) -> None:
    """A learning-rate scheduler built before the move still turns the rate that the optimizer uses."""
    model = move.place(mlp())
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    move(model, optimizer)
    steps(model, optimizer, move.after, lane, count=1)
    scheduler.step()
    expect_equal(optimizer.param_groups[0]["lr"], 0.5, "learning rate after one step of the scheduler")


@promise(cure="Repair Backend.send(): `devconv.follow` moves the state with it.", needs="values autograd foreign")
def follow_brings_an_optimizer_after_the_fact(lane: Lane) -> None:
    """An optimizer that was not named in the conversion follows when it is asked to."""
    model, twin = mlp(), mlp()
    optimizer, other = SGD(model.parameters(), lr=0.1, momentum=0.9), SGD(twin.parameters(), lr=0.1, momentum=0.9)
    steps(model, optimizer, lambda tensor: tensor, lane)
    devconv.convert(model, lane.device)
    devconv.follow(optimizer)
    steps(model, optimizer, lambda tensor: tensor.to(lane.device), lane)
    steps(twin, other, lambda tensor: tensor, lane, count=6)
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        expect_close(got, wanted, f"{name} after 3 + 3 steps", 6 * lane.precision)


@promise(
    cure="Register storage serialisation for the device, or move to the host before saving.", needs="values autograd"
)
def the_optimizers_checkpoint_loads_on_the_host(lane: Lane, move: Move) -> None:
    """The optimizer's state dict after the move loads into an optimizer on the host, which goes on from there."""
    model = move.place(mlp())
    optimizer = Adam(model.parameters(), lr=0.05)
    steps(model, optimizer, move.before, lane)
    move(model, optimizer)
    twin = mlp()
    other = Adam(twin.parameters(), lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    reference = mlp()
    wanted = Adam(reference.parameters(), lr=0.05)
    steps(reference, wanted, lambda tensor: tensor, lane)
    for (name, parameter), original in zip(twin.named_parameters(), reference.parameters(), strict=True):
        expect_close(
            other.state[parameter]["exp_avg"], wanted.state[original]["exp_avg"], f"exp_avg of {name}", move.tolerance
        )
