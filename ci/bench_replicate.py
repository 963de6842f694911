"""What replicating a module costs beside its tensors, against stock torch's own loop, in one run.

    python ci/bench_replicate.py [--replicas 2 4] [--rounds 15] [--json]

The transfer is left out on both sides: stock's loop and devconv get tensors that were copied beforehand, so that what
is measured is the Python side of a replica. A time begins with the call and ends when the replicas have been dropped.
Every round runs all ways in shuffled order; printed are milliseconds of this thread's processor time, the median and the
least of all rounds, the median of the clock on the wall, and how many times less than the stock loop's time the two
first are. Other programs add nothing to processor time, but they empty the caches that tens of thousands of small
objects are read from: on a busy machine the least is what comes near to a quiet one.

- stock: ``torch.nn.parallel.replicate`` of the installed torch, its broadcast replaced.
- cold: ``devconv.replicate``, which makes its replicas anew.
- warm: a `devconv.Replicator` that has been called before.
- mode: warm, after ``train()`` or ``eval()`` has changed every module.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from shapes import resnet1001  # type: ignore[import-not-found]  # beside this script, which is run by its path
from torch import Tensor, nn

import devconv

stock = import_module("torch.nn.parallel.replicate")
ours = import_module("devconv.parallel.replicator")

Way = Callable[[], Any]
CALLS = 4
"""Calls in a row that one time is the mean of."""


@contextmanager
def without_transfer(parameters: list[list[Tensor]], buffers: list[list[Tensor]]) -> Iterator[None]:
    """Both sides find tensors that are there already."""

    def stock_broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        if not tensors:
            return [[] for _ in devices]
        return parameters if isinstance(tensors[0], nn.Parameter) else buffers

    def our_broadcast(tensors: list[Tensor], devices: list[torch.device]) -> list[list[Tensor]]:
        return [parameters[place] + buffers[place] for place in range(len(devices))]

    def attach(rows: list[list[Tensor]], sources: list[Tensor]) -> list[list[Tensor]]:
        return rows

    with (
        patch.object(stock, "_broadcast_coalesced_reshape", stock_broadcast),
        patch.object(ours, "broadcast", our_broadcast),
        patch.object(ours, "attach", attach),
    ):
        yield


def measure(way: Way) -> tuple[float, float]:
    gc.collect()
    gc.disable()
    # The collector has emptied the processor's caches: every way is measured right after itself.
    way()
    wall, processor = time.perf_counter(), time.thread_time()
    for _ in range(CALLS):
        way()
    processor, wall = time.thread_time() - processor, time.perf_counter() - wall
    gc.enable()
    return processor / CALLS * 1e3, wall / CALLS * 1e3


def compare(model: nn.Module, replicas: int, rounds: int) -> dict[str, dict[str, float]]:
    parameters = [[tensor.detach().clone() for tensor in model.parameters()] for _ in range(replicas)]
    buffers = [[tensor.detach().clone() for tensor in model.buffers()] for _ in range(replicas)]
    devices = ["cpu"] * replicas
    replicator = devconv.Replicator(model, devices)

    def warm() -> None:
        # The replicas are dropped as soon as they are there.
        replicator()
        replicator.release()

    def mode() -> None:
        model.train(not model.training)
        warm()

    ways: dict[str, Way] = {
        "stock": lambda: stock.replicate(model, list(range(replicas))),
        "cold": lambda: devconv.replicate(model, devices),
        "warm": warm,
        "mode": mode,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with without_transfer(parameters, buffers):
        warm()
        for _ in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                times[name].append(measure(ways[name]))
    rows = {
        name: {
            "processor_ms": statistics.median(processor for processor, _ in pairs),
            "least_ms": min(processor for processor, _ in pairs),
            "wall_ms": statistics.median(wall for _, wall in pairs),
        }
        for name, pairs in times.items()
    }
    for row in rows.values():
        row["times_less_than_stock"] = rows["stock"]["processor_ms"] / row["processor_ms"]
        row["least_times_less"] = rows["stock"]["least_ms"] / row["least_ms"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = resnet1001()
    shape = {
        "modules": sum(1 for _ in model.modules()),
        "parameters": sum(1 for _ in model.parameters()),
        "buffers": sum(1 for _ in model.buffers()),
    }
    results = {replicas: compare(model, replicas, options.rounds) for replicas in options.replicas}
    if options.json:
        print(json.dumps({"torch": torch.__version__, **shape, "replicas": results}, indent=2))
        return
    print(f"torch {torch.__version__}, {shape}, {options.rounds} rounds")
    for replicas, rows in results.items():
        print(f"{replicas} replicas      median ms  least ms   wall ms   stock / this: median   least")
        for name, row in rows.items():
            print(
                f"  {name:<11}{row['processor_ms']:>12.2f}{row['least_ms']:>10.2f}{row['wall_ms']:>10.2f}"
                f"{row['times_less_than_stock']:>23.1f}{row['least_times_less']:>8.1f}"
            )


if __name__ == "__main__":
    main()
