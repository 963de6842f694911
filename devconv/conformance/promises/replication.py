"""Replicas on several devices compute as one model, and train it. One device is named twice where there is no other."""

from __future__ import annotations

import torch
from torch import nn

import devconv

from ..check import promise
from ..expecting import expect, expect_close, expect_equal
from ..lane import Lane
from ..models import Normed, batch, mlp, numbers, targets
from .grads import host_grads, loss_of


def pair(lane: Lane) -> list[torch.device]:
    """Two devices of the type, or the one twice."""
    return [lane.device, lane.second or lane.device]


@promise(cure="Return from Backend.broadcast() one list of fresh tensors for each device, in order.", needs="values")
def broadcast_gives_every_device_its_own_copies(lane: Lane) -> None:
    """Broadcast tensors are on their device, with their numbers, and no two lists share memory."""
    sources = [numbers(3, 4), torch.arange(6)]
    devices = pair(lane)
    for given in (sources, [source.to(lane.device) for source in sources]):
        rows = lane.backend.broadcast(given, devices)
        expect_equal(
            [[tensor.device for tensor in row] for row in rows], [[device] * 2 for device in devices], "devices"
        )
        rows[0][0].fill_(9.0)
        for got, wanted in zip(rows[1], sources, strict=True):
            expect_close(got, wanted, "second list, after a write into the first")


@promise(cure="Add every term in Backend.accumulate(), in order, on the device that is named.", needs="values")
def accumulate_adds_up_what_several_devices_hold(lane: Lane) -> None:
    """Sums of tensors from several devices arrive on one, without a graph."""
    first, second = pair(lane)
    terms = [[numbers(4).to(first), numbers(4).to(second), numbers(4).to(second)], [numbers(2, 3).to(second)]]
    sums = lane.backend.accumulate(terms, first)
    for got, wanted in zip(sums, [3 * numbers(4), numbers(2, 3)], strict=True):
        expect_equal((got.device, got.requires_grad), (first, False), "device of a sum, and whether it has a graph")
        expect_close(got, wanted, "a sum", 1e-6)


@promise(cure="Repair Backend.send() and broadcast(): tensors of a replica were left behind.", needs="foreign")
def replicas_are_on_their_devices(lane: Lane) -> None:
    """A model on the host is replicated to the host and to the device."""
    home, there = devconv.replicate(Normed(), ["cpu", lane.device])
    expect_equal({tensor.device.type for tensor in [*home.parameters(), *home.buffers()]}, {"cpu"}, "first replica")
    expect_equal({tensor.device for tensor in [*there.parameters(), *there.buffers()]}, {lane.device}, "second replica")


@promise(cure="Repair Backend.broadcast(): a replica has other numbers than its original.", needs="values")
def replicas_compute_as_the_model(lane: Lane) -> None:
    """Every replica gives the outputs of the model."""
    model = mlp()
    devconv.convert(model, lane.device)
    with torch.no_grad():
        wanted = mlp()(batch())
        for replica, device in zip(devconv.replicate(model, pair(lane)), pair(lane), strict=True):
            expect_close(replica(batch().to(device)), wanted, f"outputs of the replica on {device}", lane.precision)


@promise(cure="Repair Backend.accumulate(): gradients of replicas are summed by it.", needs="values autograd")
def gradients_of_replicas_meet_in_the_original(lane: Lane) -> None:
    """The gradients of two replicas add up in the model that they were made from."""
    model = mlp()
    devconv.convert(model, lane.device)
    for replica, device in zip(devconv.replicate(model, pair(lane)), pair(lane), strict=True):
        loss_of(replica, batch().to(device), targets().to(device)).backward()
    wanted = host_grads(passes=2)
    for name, parameter in model.named_parameters():
        expect(parameter.grad is not None, f"{name} has no gradient")
        expect_close(parameter.grad, wanted[name], f"{name}.grad", 2 * lane.precision)


@promise(
    cure="Repair Backend.send() and fetch(): gradients cross between host and device by them.",
    needs="values autograd foreign",
)
def host_and_device_train_one_model(lane: Lane) -> None:
    """A replica on the host and one on the device leave their gradients in one model."""
    model = mlp()
    devices = [torch.device("cpu"), lane.device]
    for replica, device in zip(devconv.replicate(model, devices), devices, strict=True):
        loss_of(replica, batch().to(device), targets().to(device)).backward()
    wanted = host_grads(passes=2)
    for name, parameter in model.named_parameters():
        expect(parameter.grad is not None, f"{name} has no gradient")
        expect_close(parameter.grad, wanted[name], f"{name}.grad", 2 * lane.precision)


class _Counting(nn.Module):
    """Writes into a buffer in place, as BatchNorm does."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.add_(inputs.sum(0))
        return inputs


@promise(cure="Support in-place updates of buffers on the device.", needs="values")
def what_the_first_replica_writes_stays(lane: Lane) -> None:
    """What the first replica writes into its buffers in place is the model's own."""
    model = _Counting()
    devconv.convert(model, lane.device)
    first, _ = devconv.replicate(model, pair(lane))
    first(batch().to(lane.device))
    expect_close(model.seen, batch().sum(0), "the buffer of the model", lane.precision)


@promise(cure="See the checks of replication before this one; then repair in-place updates.", needs="values autograd")
def data_parallel_trains_as_one_device(lane: Lane) -> None:
    """`devconv.DataParallel` over two devices trains to the numbers of one."""
    model, twin = mlp(), mlp()
    devconv.convert(model, lane.device)
    parallel = devconv.DataParallel(model, pair(lane))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    devices = [lane.device, torch.device("cpu")]
    for _ in range(3):
        for module, optimizer, device in zip((parallel, twin), optimizers, devices, strict=True):
            optimizer.zero_grad()
            loss_of(module, batch().to(device), targets().to(device)).backward()
            optimizer.step()
        lane.backend.synchronize()
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        expect_close(got, wanted, name, 3 * lane.precision)
