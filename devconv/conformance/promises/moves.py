"""Tensors cross in batches, arrive as asked for, and are copies; models do the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import devconv

from ..check import promise
from ..expecting import expect, expect_close, expect_equal
from ..lane import Lane, Move
from ..models import Normed, batch, mlp, numbers

CPU = torch.device("cpu")


def assorted() -> list[Tensor]:
    """Host tensors of several dtypes and shapes, dense, transposed, expanded, sliced, empty and without dimensions."""
    return [
        numbers(3, 4),
        torch.arange(6),
        torch.tensor(2.5),
        numbers(0, 3),
        numbers(4, 3).t(),
        numbers(3, 1).expand(3, 2),
        numbers(10)[2:7],
        torch.tensor([True, False]),
    ]


def here(lane: Lane, tensors: list[Tensor]) -> list[Tensor]:
    """Host tensors on the device, by torch itself."""
    return [tensor.to(lane.device) for tensor in tensors]


@promise(
    cure="Return from Backend.send() one tensor for each given one, in order, with its shape and numbers.",
    needs="values",
)
def send_keeps_numbers_and_order(lane: Lane) -> None:
    """A batch of tensors of different dtypes and shapes arrives whole, in order."""
    sources = assorted()
    there = lane.backend.send(sources, lane.device)
    expect_equal(len(there), len(sources), "number of tensors that send() returned")
    for index, (got, wanted) in enumerate(zip(there, sources, strict=True)):
        expect_equal(got.dtype, wanted.dtype, f"dtype of tensor {index}")
        expect_close(got, wanted, f"tensor {index} of shape {tuple(wanted.shape)}")


@promise(cure="Use the `device` that Backend.send() is given, its index included.")
def send_lands_on_the_device_asked_for(lane: Lane) -> None:
    """Sent tensors are on the device that was named, for each device of the type."""
    for device in filter(None, [lane.device, lane.second]):
        for tensor in lane.backend.send(assorted(), device):
            expect_equal(tensor.device, device, f"device of a tensor sent to {device}")


@promise(cure="Apply `dtypes` in Backend.send(), one for each tensor.", needs="values cast")
def send_casts_as_asked(lane: Lane) -> None:
    """A cast can be part of the transfer, a different one for each tensor."""
    assert lane.cast is not None
    wanted = [lane.cast, torch.float32, torch.int64]
    there = lane.backend.send([numbers(4), numbers(4), torch.arange(3)], lane.device, dtypes=wanted)
    expect_equal([tensor.dtype for tensor in there], wanted, "dtypes that arrived")
    expect_close(there[0], numbers(4).to(lane.cast), "the numbers that were cast")


@promise(cure="Return fresh tensors from Backend.send(); keep no cache of what was sent.", needs="values")
def send_makes_copies(lane: Lane) -> None:
    """Sent tensors share memory with nothing: not with their sources, and not with each other."""
    source = numbers(4)
    first, second = lane.backend.send([source, source], lane.device)
    (third,) = lane.backend.send([source], lane.device)
    first.fill_(9.0)
    expect_close(source, numbers(4), "the source after a write into its copy")
    expect_close(second, numbers(4), "the other copy of the same source")
    expect_close(third, numbers(4), "a later copy of the same source")


@promise(cure="Copy under torch.no_grad() and detach the sources in Backend.send() and fetch().", needs="autograd")
def send_and_fetch_carry_no_graph(lane: Lane) -> None:
    """Transferred tensors are leaves without requires_grad, whatever was given."""
    (there,) = lane.backend.send([numbers(4).requires_grad_()], lane.device)
    expect(there.grad_fn is None and not there.requires_grad, f"a sent tensor has {_graph(there)}")
    if lane.has_values:
        leaf = here(lane, [numbers(4)])[0].requires_grad_()
        (back,) = lane.backend.fetch([leaf])
        expect(back.grad_fn is None and not back.requires_grad, f"a fetched tensor has {_graph(back)}")


def _graph(tensor: Tensor) -> str:
    return f"requires_grad={tensor.requires_grad}, grad_fn={tensor.grad_fn}"


@promise(cure="Return [] from Backend.send(), fetch() and copy() for an empty list.")
def an_empty_batch_is_allowed(lane: Lane) -> None:
    """A batch of no tensors gives no tensors."""
    expect_equal(list(lane.backend.send([], lane.device)), [], "send([])")
    expect_equal(list(lane.backend.fetch([])), [], "fetch([])")
    expect_equal(list(lane.backend.copy([], lane.device)), [], "copy([])")


@promise(cure="Return from Backend.fetch() one host tensor for each given one, in order.", needs="values")
def fetch_keeps_numbers_and_order(lane: Lane) -> None:
    """A batch of tensors comes back to the host whole, in order."""
    wanted = assorted()
    back = lane.backend.fetch(here(lane, wanted))
    expect_equal(len(back), len(wanted), "number of tensors that fetch() returned")
    for index, (got, source) in enumerate(zip(back, wanted, strict=True)):
        expect_equal((got.device, got.dtype), (CPU, source.dtype), f"device and dtype of tensor {index}")
        expect_close(got, source, f"tensor {index} of shape {tuple(source.shape)}")


@promise(cure="Group by device inside Backend.fetch(), and put the results back in order.", needs="values second")
def fetch_takes_several_devices_at_once(lane: Lane) -> None:
    """One batch may hold tensors of several devices of the type, mixed."""
    assert lane.second is not None
    sources = [numbers(3) + index for index in range(4)]
    mixed = [source.to(lane.second if index % 2 else lane.device) for index, source in enumerate(sources)]
    for index, (got, wanted) in enumerate(zip(lane.backend.fetch(mixed), sources, strict=True)):
        expect_close(got, wanted, f"tensor {index} of a batch from two devices")


@promise(cure="Copy in Backend.fetch() even where the device's memory is host memory.", needs="values foreign")
def fetch_makes_copies(lane: Lane) -> None:
    """A fetched tensor shares no memory with the one on the device."""
    there = numbers(4).to(lane.device)
    (back,) = lane.backend.fetch([there])
    back.fill_(9.0)
    expect_close(there, numbers(4), "the device's tensor after a write into its host copy")


@promise(cure="Apply `dtypes` in Backend.fetch(), one for each tensor.", needs="values cast")
def fetch_casts_as_asked(lane: Lane) -> None:
    """A cast can be part of the way back."""
    assert lane.cast is not None
    (back,) = lane.backend.fetch(here(lane, [numbers(4)]), dtypes=[lane.cast])
    expect_equal(back.dtype, lane.cast, "dtype that came back")
    expect_close(back, numbers(4).to(lane.cast), "the numbers that were cast")


@promise(cure="Return new tensors from Backend.copy(), also when device and dtype are already right.", needs="values")
def copy_makes_copies(lane: Lane) -> None:
    """A copy on the same device in the same dtype is a copy all the same."""
    there = numbers(4).to(lane.device)
    (copied,) = lane.backend.copy([there], lane.device)
    expect_close(copied, numbers(4), "the copy")
    copied.fill_(9.0)
    expect_close(there, numbers(4), "the source after a write into its copy")


@promise(cure="Apply `dtypes` in Backend.copy().", needs="values cast")
def copy_casts_on_the_device(lane: Lane) -> None:
    """A dtype changes without leaving the device."""
    assert lane.cast is not None
    (copied,) = lane.backend.copy(here(lane, [numbers(4)]), lane.device, dtypes=[lane.cast])
    expect_equal((copied.device, copied.dtype), (lane.device, lane.cast), "device and dtype of the copy")
    expect_close(copied, numbers(4).to(lane.cast), "the numbers that were cast")


@promise(
    cure="Send to `device` in Backend.copy(); go through the host where there is no direct way.", needs="values second"
)
def copy_reaches_the_other_device(lane: Lane) -> None:
    """Tensors move from one device of the type to another, with their numbers."""
    assert lane.second is not None
    wanted = assorted()
    for index, (got, source) in enumerate(zip(lane.backend.copy(here(lane, wanted), lane.second), wanted, strict=True)):
        expect_equal(got.device, lane.second, f"device of tensor {index}")
        expect_close(got, source, f"tensor {index} of shape {tuple(source.shape)}")


@promise(cure="Keep each source alive until its queued copy has read it (non_blocking=True).", needs="values")
def a_source_may_be_dropped_after_a_non_blocking_send(lane: Lane) -> None:
    """The numbers arrive although the sources were freed and their memory reused at once."""
    wanted = numbers(4096)
    there = lane.backend.send([wanted.clone() for _ in range(8)], lane.device, non_blocking=True)
    _litter = [torch.full((4096,), -1.0) for _ in range(16)]
    lane.backend.synchronize(lane.device)
    for index, tensor in enumerate(there):
        expect_close(tensor, wanted, f"tensor {index} of a non-blocking send")


@promise(
    cure="Preserve strides in Backend.send(), fetch() and copy(), or say strides=False in Capabilities.",
    needs="strides",
)
def strides_survive(lane: Lane) -> None:
    """Transposed and channels-last tensors keep their strides on the way there, there, and on the way back."""
    sources = [numbers(4, 3).t(), numbers(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    there = lane.backend.send(sources, lane.device)
    copied = lane.backend.copy(there, lane.device)
    back = lane.backend.fetch(there) if lane.has_values else []
    for what, tensors in (("send", there), ("copy", copied), ("fetch", back)):
        for got, source in zip(tensors, sources, strict=False):
            expect_equal(got.stride(), source.stride(), f"strides after {what}()")


@promise(
    cure="Compare Backend.send() and fetch() with Tensor.to(): a model's numbers changed on the way.", needs="values"
)
def a_model_arrives_with_its_numbers(lane: Lane, move: Move) -> None:
    """Every parameter and buffer of a model has its numbers afterwards."""
    model, twin = move.place(Normed()), Normed()
    move(model)
    wanted = dict([*twin.named_parameters(), *twin.named_buffers()])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        exact = wanted[name].to(tensor.dtype)
        expect_close(tensor, exact, name, 0.0 if move.tolerance < 1e-3 else move.tolerance)


@promise(cure="Return tensors on the device and in the dtype asked for from Backend.send(), fetch() and copy().")
def nothing_is_left_behind(lane: Lane, move: Move) -> None:
    """Every parameter and buffer is on the device and, if it is floating, in the dtype that was asked for."""
    model = move.place(Normed())
    move(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        expect_equal(tensor.device, move.device, f"device of {name}")
        if tensor.is_floating_point():
            expect_equal(tensor.dtype, move.dtype, f"dtype of {name}")


@promise(cure="Compare the device's kernels with the host's: a moved model computes something else.", needs="values")
def a_moved_model_computes_the_same(lane: Lane, move: Move) -> None:
    """The model gives the same outputs afterwards as it would have given on the host."""
    model = move.place(mlp())
    move(model)
    with torch.no_grad():
        expect_close(model(move.after(batch())), mlp()(batch()), "outputs", move.tolerance)


@promise(cure="Repair Backend.resolve(): a second move to the same device must find nothing to do.")
def a_second_move_touches_nothing(lane: Lane, move: Move) -> None:
    """Moving a model to where it is already moves no bytes and keeps every object, buffers too."""
    model = move.place(Normed())
    move(model)
    before = [id(tensor) for tensor in [*model.parameters(), *model.buffers()]]
    report = move(model)
    expect_equal(report.bytes, 0, "bytes that the second move reports")
    expect_equal([id(tensor) for tensor in [*model.parameters(), *model.buffers()]], before, "identities")


@promise(cure="Make Backend.resolve() and load() free of side effects on models: planning must touch nothing.")
def a_plan_touches_nothing_and_tells_what_will_happen(lane: Lane, move: Move) -> None:
    """`devconv.plan` leaves the model where it is, and the conversion then takes exactly the planned routes."""
    model = move.place(mlp())
    plan = devconv.plan(model, move.device, move.dtype)
    expect_equal({parameter.device for parameter in model.parameters()}, {move.start.device}, "devices after planning")
    report = move(model)
    expect_equal(report.routes, plan.routes, "routes taken against routes planned")


@promise(cure="Leave Backend.in_place at None, so that devconv finds out which route works.", needs="foreign")
def the_route_is_the_one_that_the_device_needs(lane: Lane, move: Move) -> None:
    """A parameter is updated in place exactly where ``parameter.data = tensor`` works and the backend allows it."""
    parameter = torch.nn.Parameter(move.before(numbers(2)))
    try:
        parameter.data = move.after(numbers(2))
        works = parameter.device == move.device and parameter.dtype == move.dtype
    except (RuntimeError, TypeError):
        works = False
    wanted = "set-data" if works and devconv.backend_for(move.device.type).in_place is not False else "swap"
    report = move(move.place(mlp()))
    expect_equal({str(route) for route in report.routes}, {wanted}, "routes of plain parameters")


@promise(cure="Repair Backend.send(): inputs take the same way as models.", needs="values")
def nested_inputs_arrive(lane: Lane) -> None:
    """`devconv.move` takes dicts, lists and tuples of tensors there, and leaves everything else as it is."""
    moved: Any = devconv.move({"a": [numbers(3), 7], "b": (torch.arange(2), "text")}, lane.device)
    expect_equal(moved["a"][0].device, lane.device, "device of a tensor in a list in a dict")
    expect_close(moved["a"][0], numbers(3), "its numbers")
    expect_close(moved["b"][0], torch.arange(2), "the numbers of a tensor in a tuple")
    expect_equal((moved["a"][1], moved["b"][1]), (7, "text"), "what is no tensor")


@promise(
    cure="Repair Backend.copy() and fetch(): a model that is spread over devices must come together.",
    needs="values second",
)
def a_model_spread_over_devices_comes_together(lane: Lane) -> None:
    """A model with parts on the host and on two devices arrives whole on one."""
    assert lane.second is not None
    model = mlp()
    devconv.convert(model[2], lane.second)
    devconv.convert(model, lane.device)
    expect_equal({parameter.device for parameter in model.parameters()}, {lane.device}, "devices")
    for (name, got), wanted in zip(model.named_parameters(), mlp().parameters(), strict=True):
        expect_close(got, wanted, name)


@promise(cure="Support torch.empty_like(tensor, device=...) on the device.", needs="foreign")
def a_meta_model_gets_storage(lane: Lane) -> None:
    """``to_empty`` with the flag on gives a model without storage its shapes on the device, the same objects."""
    with torch.device("meta"):
        model = torch.nn.Linear(4, 2)
    weight = model.weight
    with devconv.registry_conversion():
        model.to_empty(device=lane.device)
    expect(model.weight is weight, "the parameter is another object after to_empty")
    expect_equal((weight.device, tuple(weight.shape)), (lane.device, (2, 4)), "device and shape")
