"""A moved model is the same objects: parameters, modules, attributes, references, keys."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..check import promise
from ..expecting import expect, expect_close, expect_equal
from ..lane import Lane, Move
from ..models import Normed, batch, mlp, numbers


@promise(cure="Leave Backend.in_place at None; if it is, the device's tensors cannot be swapped: report it to devconv.")
def parameters_stay_the_same_objects(lane: Lane, move: Move) -> None:
    """The parameters are the same Python objects before and after."""
    model = move.place(mlp())
    before = dict(model.named_parameters())
    move(model)
    for name, parameter in model.named_parameters():
        expect(parameter is before[name], f"{name} is another object afterwards")


@promise(cure="Return plain tensors from Backend.send(), fetch() and copy(); devconv puts them into the parameter.")
def attributes_stay_on_parameters(lane: Lane, move: Move) -> None:
    """What a program hung on a parameter is still there."""
    model = move.place(mlp())
    model[0].weight.rank = {"data": 3}
    move(model)
    expect_equal(getattr(model[0].weight, "rank", None), {"data": 3}, "attribute `rank` of 0.weight")


class Scaled(nn.Parameter):
    """A parameter with a slot of its own."""

    __slots__ = ("scale",)


@promise(cure="Return plain tensors from Backend.send(), fetch() and copy(); devconv puts them into the parameter.")
def subclasses_and_slots_stay(lane: Lane, move: Move) -> None:
    """A subclass of Parameter keeps its class and its slots."""
    model = mlp()
    model[0].weight = Scaled(model[0].weight.detach().clone())
    model[0].weight.scale = 0.5
    move(move.place(model))
    expect(type(model[0].weight) is Scaled, f"0.weight became a {type(model[0].weight).__name__}")
    expect_equal(getattr(model[0].weight, "scale", None), 0.5, "slot `scale` of 0.weight")


@promise(cure="Leave Backend.in_place at None; if it is, the device's tensors cannot be swapped: report it to devconv.")
def weak_references_stay_alive(lane: Lane, move: Move) -> None:
    """A weak reference to a parameter still refers to the model's parameter."""
    model = move.place(mlp())
    reference = weakref.ref(model[0].weight)
    move(model)
    expect(reference() is model[0].weight, "the weak reference no longer refers to 0.weight")


@promise(cure="Detach in Backend.send(), fetch() and copy(); devconv sets requires_grad itself.")
def requires_grad_stays(lane: Lane, move: Move) -> None:
    """Frozen parameters stay frozen, the others do not become so."""
    model = mlp()
    model[0].requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    move(move.place(model))
    after = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    expect_equal(after, before, "requires_grad")


@promise(cure="Keep the order of the batch in Backend.send(), fetch() and copy().")
def state_dict_keeps_keys_order_and_shapes(lane: Lane, move: Move) -> None:
    """The state dict has the same keys in the same order, and the same shapes."""
    model = move.place(Normed())
    before = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    move(model)
    expect_equal([(key, tuple(value.shape)) for key, value in model.state_dict().items()], before, "keys and shapes")


@promise(cure="Repair Backend.send() for tensors that no parameter holds: a buffer was left behind.")
def non_persistent_buffers_come_along(lane: Lane, move: Move) -> None:
    """A buffer that the state dict does not list moves with the model and stays unlisted."""
    model = move.place(Normed())
    move(model)
    expect_equal((model.table.device, model.table.dtype), (move.device, move.dtype), "device and dtype of the table")
    expect("table" not in model.state_dict(), "the non-persistent buffer is in the state dict now")


@promise(cure="Report it to devconv: the module tree itself must not change.")
def modules_stay_the_same_objects(lane: Lane, move: Move) -> None:
    """Sub-modules, also one under two names, are the same objects, in the same mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.add_module("again", model[0])
    model.eval()
    before = [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]
    move(move.place(model))
    after = [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]
    expect_equal(after, before, "modules")
    expect(not model.training and not model[0].training, "the model is in training mode afterwards")


@promise(cure="Support clone() on the device.")
def a_moved_model_can_be_copied(lane: Lane, move: Move) -> None:
    """``copy.deepcopy`` of a moved model is an independent model on the same device."""
    model = move.place(mlp())
    move(model)
    twin = copy.deepcopy(model)
    expect_equal(twin[0].weight.device, move.device, "device of the copy")
    expect(twin[0].weight is not model[0].weight, "the copy shares its parameters with the model")
    if lane.has_values:
        with torch.no_grad():
            twin[0].weight.fill_(0.0)
        expect_close(
            model[0].weight.to("cpu", torch.float32), mlp()[0].weight, "the model after a write", move.tolerance
        )


@promise(cure="Register storage serialisation for the device, or move to the host before saving.", needs="values")
def a_moved_model_can_be_pickled(lane: Lane, move: Move) -> None:
    """A moved model goes through pickle and back with its numbers, on its device."""
    model = move.place(mlp())
    move(model)
    back: Any = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes
    expect_equal(back[0].weight.device, move.device, "device of the unpickled model")
    expect_close(back[0].weight.to("cpu", torch.float32), mlp()[0].weight, "0.weight", move.tolerance)


@promise(
    cure="Register storage serialisation for the device in torch, so that torch.load(map_location='cpu') works.",
    needs="values",
)
def a_checkpoint_of_a_moved_model_loads_on_the_host(lane: Lane, move: Move) -> None:
    """What ``torch.save`` writes of a moved model's state dict loads into a model on the host."""
    model = move.place(Normed())
    move(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin = Normed()
    twin.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    expect_close(twin.first.weight, Normed().first.weight, "first.weight", move.tolerance)


@promise(cure="Support copy_() from the host on the device.", needs="values")
def a_checkpoint_loads_into_a_moved_model(lane: Lane, move: Move) -> None:
    """``load_state_dict`` with a checkpoint from the host writes into the moved model, in place."""
    model = move.place(mlp())
    move(model)
    weight = model[0].weight
    model.load_state_dict({name: numbers(*value.shape, scale=3.0) for name, value in mlp().state_dict().items()})
    expect(model[0].weight is weight and weight.device == move.device, "0.weight is another object, or elsewhere")
    expect_close(weight.to("cpu", torch.float32), numbers(4, 4, scale=3.0), "0.weight", move.tolerance)


@promise(cure="Keep a source's memory valid until its copy is complete; free it afterwards.")
def the_old_memory_is_let_go(lane: Lane, move: Move) -> None:
    """After a move nothing holds the tensors that the model had before."""
    model = move.place(mlp())
    with torch.no_grad():
        model(move.before(batch()))
    storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    move(model)
    expect(all(storage.expired() for storage in storages), "a storage of the model before the move is still alive")
