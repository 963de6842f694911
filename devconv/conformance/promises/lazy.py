"""A lazy layer stays lazy on the way, and gets its shape and storage on the device that it was moved to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import devconv

from ..check import promise
from ..expecting import expect, expect_close, expect_equal
from ..lane import Lane, Move
from ..models import batch, numbers, targets


def lazy_mlp() -> Any:
    """Two lazy layers, an ``nn.Sequential``; takes what the other models take."""
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))


@promise(cure="Leave Backend.in_place at None; if it is, report it to devconv.")
def a_lazy_parameter_stays_lazy(lane: Lane, move: Move) -> None:
    """A move leaves an uninitialised parameter uninitialised, the same object, with what hangs on it."""
    model = lazy_mlp()
    weight = model[0].weight
    weight.rank = 3
    move(move.place(model))
    expect(model[0].weight is weight, "0.weight is another object afterwards")
    expect(is_lazy(weight), "0.weight is no longer lazy")
    expect_equal(getattr(weight, "rank", None), 3, "attribute `rank` of 0.weight")


@promise(cure="Support torch.empty(shape, dtype=..., device=...) and in-place initialisation on the device.")
def a_lazy_parameter_materialises_where_it_was_moved_to(lane: Lane, move: Move) -> None:
    """The first forward pass gives every parameter its shape on the device and in the dtype of the move."""
    model = move.place(lazy_mlp())
    weight = model[0].weight
    move(model)
    model(move.after(batch()))
    expect(model[0].weight is weight, "0.weight is another object after the first forward pass")
    for name, parameter in model.named_parameters():
        expect_equal((parameter.device, parameter.dtype), (move.device, move.dtype), f"device and dtype of {name}")
    expect_equal(tuple(weight.shape), (4, 4), "shape of 0.weight")


@promise(cure="Support torch.empty(shape, dtype=..., device=...) on the device for buffers, integers included.")
def a_lazy_buffer_materialises_where_it_was_moved_to(lane: Lane, move: Move) -> None:
    """The running statistics of a lazy batch norm are made on the device of the move."""
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    move(move.place(model))
    model(move.after(batch()))
    for name, buffer in model.named_buffers():
        expect_equal(buffer.device, move.device, f"device of {name}")


@promise(cure="See lazy.a_lazy_parameter_stays_lazy.")
def a_shared_lazy_parameter_stays_one(lane: Lane, move: Move) -> None:
    """A lazy parameter of two layers is one parameter afterwards, lazy and materialised."""
    model = nn.Sequential(nn.LazyLinear(4, bias=False), nn.Tanh(), nn.LazyLinear(4, bias=False))
    model[2].weight = model[0].weight
    move(move.place(model))
    expect(model[2].weight is model[0].weight, "the two layers have two parameters while lazy")
    model[0](move.after(batch()))
    expect(model[2].weight is model[0].weight, "the two layers have two parameters once materialised")


@promise(cure="See lazy.a_lazy_parameter_materialises_where_it_was_moved_to.", needs="values autograd")
def an_optimizer_built_on_lazy_parameters_trains_them(lane: Lane, move: Move) -> None:
    """SGD built before move and first forward updates the real parameters on the device."""
    model = move.place(lazy_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    move(model, optimizer)
    loss = ((model(move.after(batch())) - move.after(targets())) ** 2).mean()
    before = model[0].weight.detach().to("cpu", copy=True)
    loss.backward()
    optimizer.step()
    expect(not torch.equal(model[0].weight.detach().cpu(), before), "a step did not change the materialised parameter")


@promise(cure="See lazy.a_lazy_parameter_stays_lazy.", needs="foreign")
def a_lazy_layer_can_be_moved_twice(lane: Lane) -> None:
    """There and back again, a lazy layer is lazy, and materialises on the host."""
    model = lazy_mlp()
    devconv.convert(model, lane.device)
    devconv.convert(model, "cpu")
    expect(is_lazy(model[0].weight), "0.weight is no longer lazy")
    model(batch())
    expect_equal(model[0].weight.device.type, "cpu", "device of 0.weight")


@promise(cure="Support torch.empty(shape, dtype=..., device=...) and in-place initialisation on the device.")
def materialize_makes_every_parameter_on_the_device(lane: Lane, move: Move) -> None:
    """`devconv.materialize` gives every parameter its shape and storage on the device."""
    model = lazy_mlp()
    move(move.place(model))
    devconv.materialize(model, move.after(batch()))
    for name, parameter in model.named_parameters():
        expect(not is_lazy(parameter), f"{name} is still lazy")
        expect_equal((parameter.device, parameter.dtype), (move.device, move.dtype), f"device and dtype of {name}")
    expect_equal(tuple(model[2].weight.shape), (2, 4), "shape of 2.weight")


@promise(
    cure="Repair Backend.send(): numbers that are drawn on the host are sent one tensor at a time.",
    needs="values foreign",
)
def the_same_seed_gives_the_same_model_on_every_device(lane: Lane) -> None:
    """With ``init="host"`` a lazy model materialised on the device equals the one on the host, bit for bit."""
    models = lazy_mlp(), lazy_mlp()
    devconv.convert(models[0], lane.device)
    for model, device in zip(models, (lane.device, torch.device("cpu")), strict=True):
        torch.manual_seed(3)
        devconv.materialize(model, batch().to(device), init="host")
    for (name, got), wanted in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        expect_close(got, wanted, name)


@promise(cure="Support copy_() from the host on the device.", needs="values")
def a_checkpoint_fills_a_moved_lazy_layer(lane: Lane, move: Move) -> None:
    """A checkpoint of an initialised layer, loaded into a lazy one, gives its numbers the place of the move."""
    model = nn.LazyLinear(2)
    move(move.place(model))
    with devconv.registry_conversion():
        model.load_state_dict({"weight": numbers(2, 4), "bias": numbers(2)})
    expect(not is_lazy(model.weight), "the weight is still lazy after loading")
    expect_equal((model.weight.device, model.weight.dtype), (move.device, move.dtype), "device and dtype of the weight")
    expect_close(model.weight.to("cpu", torch.float32), numbers(2, 4), "the weight", move.tolerance)
