"""Cases on XLA over gloo: every rank has a PJRT client of its own, gradients pass through the host."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch_xla
from torch import nn

import devconv
from devconv.distributed import no_sync, release, replicate

BATCH = 8


class Net(nn.Module):
    """A tie and a branch."""

    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.out.weight = self.into.weight
        self.extra = nn.Linear(6, 6)

    def forward(self, inputs, extra=True):
        hidden = self.norm(self.into(inputs))
        return self.out(torch.tanh(self.extra(hidden) if extra else hidden))


def part(tensor, rank, size):
    return tensor.chunk(size)[rank]


def distance(one, other):
    tensors = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.cpu().double() - b.cpu().double()).abs().max().item() for a, b in tensors)


def different_ranks(tensor):
    host = tensor.detach().cpu()
    everyone = [torch.empty_like(host) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, host)
    return max((other.double() - everyone[0].double()).abs().max().item() for other in everyone)


def train(model, optimizer, inputs, device):
    losses = []
    for batch in inputs:
        optimizer.zero_grad()
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        if device != "cpu":
            torch_xla.sync()
        losses.append(loss.item())
    return losses


def torch_does_not_reduce_xla_over_gloo(rank, size):
    value = torch.ones(2, device="xla")
    dist.all_reduce(value)
    return {"value": value.cpu().tolist()}


def trains_as_one_process(rank, size):
    reference = Net()
    model = replicate(copy.deepcopy(reference))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    devconv.convert(model, "xla")
    inputs = torch.randn(4, BATCH, 6)
    losses = torch.tensor(train(model, optimizer, [part(batch, rank, size) for batch in inputs], "xla"))
    expected = train(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), inputs, "cpu")
    dist.all_reduce(losses)
    return {
        "loss": (losses / size - torch.tensor(expected)).abs().max().item(),
        "fell": expected[0] - expected[-1],
        "state": distance(model, reference),
        "device": str(model.into.weight.device),
        "ranks": different_ranks(model.into.weight),
    }


def starts_from_rank_0_and_follows_its_buffers(rank, size):
    torch.manual_seed(rank)
    model = replicate(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    devconv.convert(model, "xla")
    model(torch.randn(BATCH, 6).to("xla") + rank).square().sum().backward()
    parameters = different_ranks(model[0].weight)
    apart = different_ranks(model[1].running_mean)
    with torch.no_grad():
        model.eval()(torch.ones(2, 6, device="xla"))
    return {"parameters": parameters, "apart": apart, "together": different_ranks(model[1].running_mean)}


def lazy_module(rank, size):
    torch.manual_seed(rank)
    model = replicate(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)))
    devconv.convert(model, "xla")
    model(torch.ones(2, 3, device="xla") * (rank + 1)).sum().backward()
    return {
        "device": str(model[0].weight.device),
        "parameters": different_ranks(model[0].weight),
        "gradients": different_ranks(model[0].weight.grad),
    }


def accumulates_without_sync(rank, size):
    reference = Net()
    model = replicate(copy.deepcopy(reference))
    devconv.convert(model, "xla")
    inputs = torch.randn(3, BATCH, 6)
    for batch in inputs:
        reference(batch).square().mean().backward()
    with no_sync(model):
        for batch in inputs[:2]:
            model(part(batch, rank, size).to("xla")).square().mean().backward()
        inside = different_ranks(model.into.weight.grad)
    model(part(inputs[2], rank, size).to("xla")).square().mean().backward()
    return {
        "apart_inside": inside,
        "grad": (model.into.weight.grad.cpu() - reference.into.weight.grad).abs().max().item(),
    }


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs, left):
        return (self.left if left else self.right)(inputs)


def ranks_use_different_parameters(rank, size):
    model = replicate(Branches())
    devconv.convert(model, "xla")
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 3, device="xla"), rank == 0).sum().backward()
    return {
        "left": model.left.weight.grad.mean().item(),
        "right": model.right.weight.grad.mean().item(),
        "never": model.never.weight.grad,
    }


def moved_to_xla_after_the_first_step(rank, size):
    reference = Net()
    model = replicate(copy.deepcopy(reference))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(4, BATCH, 6)
    mine = [part(batch, rank, size) for batch in inputs]
    train(model, optimizer, mine[:2], "cpu")
    release(model)
    devconv.convert(model, "xla", optimizers=optimizer)
    train(model, optimizer, mine[2:], "xla")
    train(reference, plain, inputs, "cpu")
    return {"state": distance(model, reference), "device": str(model.into.weight.device)}
