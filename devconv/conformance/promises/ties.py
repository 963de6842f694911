"""What was one tensor, or one storage, stays one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import devconv

from ..check import promise
from ..expecting import expect, expect_close, expect_equal
from ..lane import Lane, Move
from ..models import Flat, Tied, numbers, steps


@promise(cure="Leave Backend.in_place at None; return one tensor for each given one, never a merged or split list.")
def a_shared_parameter_stays_one(lane: Lane, move: Move) -> None:
    """A parameter of two modules is one object in both, and is counted once."""
    model = move.place(Tied())
    count = len(list(model.parameters()))
    move(model)
    expect(model.decoder.weight is model.encoder.weight, "encoder.weight and decoder.weight are two objects now")
    expect_equal(len(list(model.parameters())), count, "number of parameters")


@promise(cure="Return one tensor for each given one from Backend.send(), fetch() and copy().")
def a_shared_buffer_stays_one(lane: Lane, move: Move) -> None:
    """A buffer of two modules is one object in both."""
    model = move.place(Tied())
    move(model)
    expect(model.decoder.mask is model.encoder.mask, "encoder.mask and decoder.mask are two objects now")
    expect_equal(model.encoder.mask.device, move.device, "its device")


@promise(
    cure="See ties.a_shared_parameter_stays_one; repair in-place operations on the device.", needs="values autograd"
)
def a_shared_parameter_trains_as_one(lane: Lane, move: Move) -> None:
    """After a move an optimizer built before it trains the shared parameter, in both places."""
    model = move.place(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    move(model, optimizer)
    before = model.encoder.weight.detach().to("cpu", copy=True)
    steps(model, optimizer, move.after, lane, count=1)
    expect(not torch.equal(model.encoder.weight.detach().cpu(), before), "a step did not change the shared parameter")
    expect_close(model.decoder.weight, model.encoder.weight, "decoder.weight against encoder.weight")


@promise(cure="Support as_strided() on the device, or say storage_aliasing=False.", needs="values aliasing")
def views_of_one_storage_stay_views(lane: Lane, move: Move) -> None:
    """Parameters that are parts of one flat buffer are so afterwards: what is written into it shows in them."""
    model = move.place(Flat())
    move(model)
    expect_close(model.second.to("cpu", torch.float32), Flat().second, "second", move.tolerance)
    model.whole.fill_(2.0)
    expect_close(model.first.to("cpu", torch.float32), torch.full((4, 4), 2.0), "first, after a write into the whole")
    expect_close(model.second.to("cpu", torch.float32), torch.full((2, 4), 2.0), "second, after a write into the whole")


class _Window(nn.Module):
    """A buffer that views a part of another one."""

    table: Tensor
    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", numbers(8))
        self.register_buffer("window", self.table[2:4])


@promise(cure="Support as_strided() on the device, or say storage_aliasing=False.", needs="values aliasing")
def a_buffer_that_views_a_buffer_follows_it(lane: Lane, move: Move) -> None:
    """A buffer that is a part of another one shows what is written into that."""
    model = move.place(_Window())
    move(model)
    model.table.fill_(3.0)
    expect_close(
        model.window.to("cpu", torch.float32), torch.full((2,), 3.0), "the window after a write into the table"
    )


@promise(
    cure="Repair both Backend.send() and Backend.fetch(): the round trip must end where it began.",
    needs="foreign values",
)
def ties_survive_a_round_trip(lane: Lane) -> None:
    """There and back, a shared parameter is one object with its numbers."""
    model = Tied()
    devconv.convert(model, lane.device)
    devconv.convert(model, "cpu")
    expect(model.decoder.weight is model.encoder.weight, "encoder.weight and decoder.weight are two objects now")
    expect_close(model.encoder.weight, Tied().encoder.weight, "encoder.weight after the round trip")


@promise(cure="Support as_strided() and in-place updates of views on the device.", needs="values autograd aliasing")
def views_train_as_views(lane: Lane, move: Move) -> None:
    """An optimizer step after the move writes through the views into the one storage."""
    model = move.place(Flat())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    move(model, optimizer)
    steps(model, optimizer, move.after, lane, count=1)
    expect_close(model.whole[16:].view(2, 4), model.second, "the whole's tail against the parameter that views it")
