"""Cases on the CPU over gloo. Every rank computes the one-process reference itself."""

from __future__ import annotations

import copy
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import devconv
from devconv.distributed import no_sync, release, replicate

BATCH = 16


class Net(nn.Module):
    """A tie, a frozen layer, and a part that is used once."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.frozen(self.embed(tokens)))))


def batches(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(0, 11, (BATCH,), generator=generator), torch.randint(0, 11, (BATCH,), generator=generator)


def part(tensor, rank, size):
    return tensor.chunk(size)[rank]


def train(model, optimizer, steps, rank=0, size=1, seed=1):
    losses = []
    for inputs, targets in batches(steps, seed):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(part(inputs, rank, size)), part(targets, rank, size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def distance(one, other):
    """Largest difference between the parameters and buffers of two modules."""
    tensors = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in tensors)


def mean_over_ranks(values):
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def different_ranks(tensor):
    """Largest difference between the ranks' values of a tensor."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.detach().contiguous())
    return max((other.double() - everyone[0].double()).abs().max().item() for other in everyone)


def trains_as_one_process(rank, size):
    reference = Net()
    model = copy.deepcopy(reference)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    replicate(model)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=0.05), 5)
    losses = mean_over_ranks(train(model, optimizer, 5, rank, size))
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "fell": expected[0] - expected[-1],
        "state": distance(model, reference),
    }


def trains_through_the_host(rank, size):
    class Silent(devconv.Backend):
        """The CPU, as a device that no process group reduces."""

        device_type = "cpu"

        def current_index(self):
            return None

        def resolve(self, device):
            return torch.device("cpu")

    devconv.register(Silent)
    try:
        facts = {**trains_as_one_process(rank, size), **ranks_use_different_parameters(rank, size)}
        model = replicate(Branches())
        with no_sync(model):
            model(torch.full((1, 3), float(rank)), True).sum().backward()
        model(torch.ones(1, 3), False).sum().backward()
        return {**facts, "left_before": model.left.weight.grad.mean().item()}
    finally:
        devconv.unregister("cpu")


def starts_from_rank_0(rank, size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[1].running_mean.fill_(rank)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    replicate(model.eval())(torch.ones(2, 3))
    return {"state": distance(model, expected)}


def buffers_follow_rank_0(rank, size):
    model = replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    for _ in range(3):
        model(torch.randn(8, 3) + rank).sum().backward()
    # Passes of no_sync leave them apart, the next one brings them together.
    with no_sync(model):
        model(torch.randn(8, 3) + rank).sum().backward()
    apart = different_ranks(model[1].running_mean)
    mine = model[1].running_mean.clone()
    model.eval()(torch.ones(2, 3))
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, 0)
    return {
        "apart": apart,
        "together": different_ranks(model[1].running_mean),
        "rank_0": (model[1].running_mean - of_rank_0).abs().max().item(),
    }


def lazy_module(rank, size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model[0].weight
    replicate(model)
    model(torch.zeros(2, 6))
    reference = copy.deepcopy(model)
    inputs = torch.randn(4, BATCH, 6)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    dist.broadcast(inputs, 0)
    for batch in inputs:
        for net, step, own in ((model, optimizer, part(batch, rank, size)), (reference, plain, batch)):
            step.zero_grad()
            net(own).square().mean().backward()
            step.step()
    return {
        "same_object": model[0].weight is weight,
        "in_features": model[0].in_features,
        "state": distance(model, reference),
    }


def accumulates_without_sync(rank, size):
    reference = nn.Linear(3, 2)
    model = replicate(copy.deepcopy(reference))
    inputs = torch.randn(3, BATCH, 3)
    for batch in inputs:
        reference(batch).square().mean().backward()
    with no_sync(model):
        for batch in inputs[:2]:
            model(part(batch, rank, size)).square().mean().backward()
        local = different_ranks(model.weight.grad)
    model(part(inputs[2], rank, size)).square().mean().backward()
    return {
        "apart_inside": local,
        "grad": (model.weight.grad - reference.weight.grad).abs().max().item(),
    }


def one_rank_evaluates(rank, size):
    model = replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 3)).sum().backward()
    if rank == 0:
        model.eval()
        with no_sync(model), torch.no_grad():
            model(torch.ones(2, 3))
        model.train()
    model(torch.randn(8, 3)).sum().backward()
    return {"done": True}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs, left):
        return (self.left if left else self.right)(inputs)


def ranks_use_different_parameters(rank, size):
    model = replicate(Branches(), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 3), rank == 0).sum().backward()
    return {
        "left": model.left.weight.grad.mean().item(),
        "right": model.right.weight.grad.mean().item(),
        "never": model.never.weight.grad,
    }


def unused_parameters_are_named(rank, size):
    model = replicate(Branches())
    model(torch.ones(2, 3), True).sum().backward()
    try:
        model(torch.ones(2, 3), True)
    except devconv.UnusedParametersError as error:
        return {"names": error.names}
    return {"names": None}


def moved_after_the_first_step(rank, size):
    reference = Net()
    model = replicate(copy.deepcopy(reference))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 2, rank, size)
    train(reference, plain, 2)
    release(model)
    devconv.convert(model, dtype=torch.float64, optimizers=optimizer)
    devconv.convert(reference, dtype=torch.float64, optimizers=plain)
    train(model, optimizer, 3, rank, size, seed=2)
    train(reference, plain, 3, seed=2)
    return {"state": distance(model, reference), "dtype": str(model.embed.weight.dtype)}


def moved_by_stock_torch(rank, size):
    reference = Net()
    model = replicate(copy.deepcopy(reference))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    train(model, optimizer, 2, rank, size)
    train(reference, plain, 2)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.double()
    reference.double()
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    # Stock torch has put new parameters in the old ones' place.
    model.head.weight, reference.head.weight = model.embed.weight, reference.embed.weight
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, rank, size, seed=2)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 3, seed=2)
    return {"state": distance(model, reference), "ranks": different_ranks(model.embed.weight)}


def unfrozen_later(rank, size):
    reference = Net()
    model = replicate(copy.deepcopy(reference))
    for net, mine, of in ((model, rank, size), (reference, 0, 1)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, optimizer, 2, mine, of)
        net.frozen.requires_grad_(True)
        train(net, optimizer, 2, mine, of, seed=2)
    return {"state": distance(model, reference)}


def left_to_others(rank, size):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[3].weight = model[1].weight
    replicate(model[2])
    replicate(model, ignored_modules=[model[1]])
    for _ in range(2):
        model.zero_grad()
        model(torch.full((2, 3), float(rank))).square().sum().backward()
    return {
        "kept": different_ranks(model[0].weight.grad),
        "ignored": different_ranks(model[1].weight.grad),
        "inner": different_ranks(model[2].weight.grad),
        "shared_with_ignored": different_ranks(model[3].bias.grad),
    }


def sparse_and_bucket_views(rank, size):
    reference = nn.Embedding(11, 3, sparse=True)
    sparse = replicate(copy.deepcopy(reference))
    viewed = replicate(nn.Linear(3, 2), gradient_as_bucket_view=True, bucket_cap_mb=0.00001)
    plain = copy.deepcopy(viewed)
    tokens, inputs = torch.arange(BATCH) % 11, torch.randn(BATCH, 3)
    for _ in range(2):
        for net in (reference, sparse, viewed, plain):
            net.zero_grad()
        reference(tokens).square().mean().backward()
        sparse(part(tokens, rank, size)).square().mean().backward()
        plain(inputs).square().mean().backward()
        viewed(part(inputs, rank, size)).square().mean().backward()
    return {
        "layout": str(sparse.weight.grad.layout),
        "sparse": (sparse.weight.grad.to_dense() - reference.weight.grad.to_dense()).abs().max().item(),
        "viewed": (viewed.weight.grad - plain.weight.grad).abs().max().item(),
    }


def modules_differ(rank, size):
    model = replicate(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2 + rank)))
    try:
        model(torch.ones(2, 3))
    except devconv.RanksDisagreeError as error:
        return {"rank": error.rank, "name": error.name, "why": error.why}
    return {"rank": None}


def a_rank_stays_away(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = replicate(nn.Linear(3, 2), process_group=group)
    started = time.monotonic()
    facts = {"text": "", "seconds": 0}
    try:
        if rank < size - 1:
            model(torch.ones(2, 3))
    except devconv.RankLostError as error:
        facts = {"text": str(error), "seconds": time.monotonic() - started}
    # Nobody goes on to the next case, or ends, while another rank still waits.
    dist.barrier()
    return facts


def a_rank_leaves_the_loop(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = replicate(nn.Linear(3, 2), process_group=group)
    # torch arranges its buckets anew in the second forward pass, which is a collective of its own.
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    started = time.monotonic()
    facts = {"text": "", "seconds": 0}
    try:
        if rank < size - 1:
            model(torch.ones(2, 3)).sum().backward()
    except RuntimeError as error:
        facts = {"text": str(error), "seconds": time.monotonic() - started}
    # Nobody goes on to the next case, or ends, while another rank still waits.
    dist.barrier()
    return facts


def two_groups(rank, size):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine = groups[rank // 2]
    model = replicate(nn.Linear(3, 1, bias=False), process_group=mine)
    model(torch.full((1, 3), float(rank))).sum().backward()
    try:
        replicate(nn.Linear(3, 1), process_group=groups[1 - rank // 2])
    except devconv.ProcessGroupError as error:
        return {"grad": model.weight.grad.mean().item(), "outside": str(error)}
    return {"grad": model.weight.grad.mean().item(), "outside": None}


def a_rank_dies(rank, size):
    # torchrun ends the others as soon as it sees one die; what they would have said by themselves is wanted.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    model = replicate(nn.Linear(3, 2))
    started = time.monotonic()
    try:
        for step in range(5):
            if rank == 1 and step == 2:
                os._exit(17)
            model(torch.ones(2, 3)).sum().backward()
    except RuntimeError as error:
        return {"text": str(error), "seconds": time.monotonic() - started}
    return {"text": None}
