"""Numbers for docs/replication.md: ``python tests/distributed/measure.py gloo``, or ``mesh``, ``host``, ``parallel``.

Each way trains the same model on the same batches as one process does, in the same run: losses, the largest difference
of a parameter, and the time of a step. `gloo` also drives torch's own DistributedDataParallel, `host` runs two
processes with an XLA device each, and `parallel` is devconv.DataParallel over four XLA devices of one process.
"""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import time
from collections import OrderedDict

STEPS, WARM, BATCH, WIDTH = 30, 5, 128, 512


def main(way: str) -> None:
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MEASURE": way}
    if way in ("mesh", "parallel"):
        for devices in ("1", "4"):
            environment = {**common, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": devices}
            subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=580)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**common, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    subprocess.run(torchrun, env=environment, check=True, timeout=580)


def model():
    from torch import nn

    layers = [(f"layer{i}", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())) for i in range(6)]
    return nn.Sequential(OrderedDict([*layers, ("out", nn.Linear(WIDTH, 10))]))


def batches():
    import torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        yield inputs, inputs[:, :10].argmax(1)


def train(net, rank=0, size=1, device="cpu", sync=lambda: None):
    """Losses, and seconds of a step, the median over all but the first few."""
    import torch

    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses, seconds = [], []
    for batch in batches():
        started = time.perf_counter()
        inputs, targets = (part.chunk(size)[rank].to(device) for part in batch)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        sync()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, statistics.median(seconds[WARM:])


def distance(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in pairs)


def show(name, losses, expected, away, seconds, base):
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    sys.stdout.write(
        f"{name:44} loss {losses[0]:.4f} -> {losses[-1]:.4f}, difference {worst:.1e}, parameters {away:.1e}, "
        f"{seconds * 1e3:7.1f} ms a step, {seconds / base:.2f} of one process\n"
    )
    sys.stdout.flush()


def on_ranks(way):
    import torch
    import torch.distributed as dist

    import devconv

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    original = model()

    def averaged(losses):
        total = torch.tensor(losses)
        dist.all_reduce(total)
        return (total / size).tolist()

    reference = copy.deepcopy(original)
    expected, base = [], 1.0
    # One process at a time, so that the one has the machine to itself.
    for turn in range(size):
        if turn == rank:
            expected, base = train(reference)
        dist.barrier()
    if way == "host":
        import torch_xla

        single = copy.deepcopy(original)
        for turn in range(size):
            if turn == rank:
                devconv.convert(single, "xla")
                losses, on_one = train(single, device="xla", sync=torch_xla.sync)
            dist.barrier()
        ours = copy.deepcopy(original)
        devconv.convert(ours, "xla")
        devconv.distributed.replicate(ours)
        mine, seconds = train(ours, rank, size, "xla", torch_xla.sync)
        rows = [("one process, one XLA device", losses, distance(single, reference), on_one)]
        rows += [("replicate, 2 ranks, XLA through the host", averaged(mine), distance(ours, reference), seconds)]
    else:
        stock, ours = copy.deepcopy(original), copy.deepcopy(original)
        theirs, stock_seconds = train(torch.nn.parallel.DistributedDataParallel(stock), rank, size)
        devconv.distributed.replicate(ours)
        mine, seconds = train(ours, rank, size)
        rows = [
            ("DistributedDataParallel, 2 ranks, gloo", averaged(theirs), distance(stock, reference), stock_seconds),
            ("replicate, 2 ranks, gloo", averaged(mine), distance(ours, reference), seconds),
        ]
    if rank == 0:
        show("one process, one thread", expected, expected, 0.0, base, base)
        for name, losses, away, seconds in rows:
            show(name, losses, expected, away, seconds, base)
    dist.barrier()
    os._exit(0)


def on_parallel():
    import torch
    import torch_xla

    import devconv

    count = int(os.environ["CPU_NUM_DEVICES"])
    torch.manual_seed(0)
    original = model()
    ours, reference = copy.deepcopy(original), copy.deepcopy(original)
    devconv.convert(ours, "xla:0")
    replicas = devconv.DataParallel(ours, [f"xla:{index}" for index in range(count)])
    losses, seconds = train(replicas, device="xla:0", sync=torch_xla.sync)
    expected, base = train(reference)
    if count == 1:
        show("one process on the CPU, one thread", expected, expected, 0.0, base, base)
    name = f"DataParallel over {count} XLA device{'s' if count > 1 else ''}"
    show(name, losses, expected, distance(ours, reference), seconds, base)
    os._exit(0)


def on_mesh():
    import torch

    devices = os.environ["CPU_NUM_DEVICES"]
    torch.manual_seed(0)
    original = model()
    ours, reference = copy.deepcopy(original), copy.deepcopy(original)
    if devices != "1":
        from devconv_xla import spmd

        mesh = spmd.start()
    import torch_xla

    import devconv

    devconv.convert(ours, "xla")
    if devices != "1":
        devconv.distributed.replicate(ours, mesh=mesh)
    losses, seconds = train(ours, device="xla", sync=torch_xla.sync)
    expected, base = train(reference)
    if devices == "1":
        show("one process on the CPU, one thread", expected, expected, 0.0, base, base)
        show("one process, one XLA device", losses, expected, distance(ours, reference), seconds, base)
    else:
        show("replicate over a mesh of 4 XLA devices", losses, expected, distance(ours, reference), seconds, base)
    os._exit(0)


if __name__ == "__main__":
    running = os.environ.get("MEASURE")
    if running is None:
        main(sys.argv[1])
    elif running == "mesh":
        on_mesh()
    elif running == "parallel":
        on_parallel()
    else:
        on_ranks(running)
