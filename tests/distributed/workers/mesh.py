"""One process, four XLA devices as a mesh: prints the facts of each case as JSON. ``mesh.py CASE...``."""

from __future__ import annotations

import copy
import json
import os
import sys

import torch
from torch import nn

import devconv
from devconv.distributed import no_sync, replicate


def distance(one, other):
    # torch_xla keeps a running mean of the biased variance, stock torch of the unbiased one, on one device as on four.
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    same = [(a, b) for (name, a), b in pairs if not name.endswith("running_var")]
    return max((a.cpu().double() - b.cpu().double()).abs().max().item() for a, b in same)


def spec(tensor):
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def refused(call):
    try:
        call()
    except devconv.ReplicationRefused as error:
        return [str(reason) for reason in error.reasons]
    return None


def trains():
    from devconv_xla import spmd

    mesh = spmd.start()
    reference = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    reference[3].weight = reference[0].weight
    model = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    names = list(model.state_dict())
    same = replicate(model, mesh=mesh) is model
    before_the_move = refused(lambda: model(torch.ones(4, 8)))
    devconv.convert(model, "xla")
    host_inputs = refused(lambda: model(torch.ones(4, 8)))
    import torch_xla

    losses, expected, marks = [], [], set()
    everything = torch.randn(16, 8)
    # The last batch cannot be split evenly.
    for rows in (16, 16, 16, 16, 10):
        inputs = everything[:rows]
        targets = inputs[:, :2]
        for net, step, device, found in (
            (model, optimizer, "xla", losses),
            (reference, plain, "cpu", expected),
        ):
            step.zero_grad()
            batch = inputs.to(device)
            with no_sync(model):
                loss = nn.functional.mse_loss(net(batch), targets.to(device))
            loss.backward()
            step.step()
            if device == "xla":
                marks.add(spec(batch))
                torch_xla.sync()
            found.append(loss.item())
    return {
        "same": same and list(model.state_dict()) == names and type(model) is nn.Sequential,
        "size": mesh.size,
        "loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "fell": expected[0] - expected[3],
        "state": distance(model, reference),
        "inputs": sorted(marks),
        "parameters": sorted({spec(tensor) for tensor in model.parameters()}),
        "before_the_move": before_the_move,
        "host_inputs": host_inputs,
    }


def lazy_module():
    from devconv_xla import spmd

    model = replicate(nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2)), mesh=spmd.start())
    devconv.convert(model, "xla")
    inputs = torch.ones(8, 3)
    for _ in range(2):
        output = model(inputs.to("xla"))
    host = copy.deepcopy(model).cpu()
    return {
        "mark": spec(model[0].weight),
        "output": (output.cpu() - host(inputs)).abs().max().item(),
    }


def too_late():
    import torch_xla

    # The least that fixes the runtime's devices; prepare() and every move do more.
    torch_xla.runtime.addressable_device_count()
    from devconv_xla import spmd

    try:
        spmd.start()
    except devconv.MeshTooLateError as error:
        text = str(error)
    else:
        return {"text": None}
    layer = nn.Linear(2, 1)
    devconv.convert(layer, "xla:1")
    layer(torch.ones(3, 2, device="xla:1")).sum().backward()
    return {"text": text, "grad": layer.weight.grad.cpu().tolist()}


if __name__ == "__main__":
    facts = {}
    for case in sys.argv[1:]:
        torch.manual_seed(0)
        facts[case] = globals()[case]()
    sys.stdout.write("FACTS" + json.dumps(facts) + "\n")
    sys.stdout.flush()
    os._exit(0)
