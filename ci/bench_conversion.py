"""How long a whole-model conversion takes, against stock torch and against one raw batched send, in one run.

    python ci/bench_conversion.py [--device xla] [--rounds 15] [--json]

Every round converts a fresh copy of the same model in each way, in shuffled order; a time ends when the last tensor is
ready on the device, and the sources stay alive, so that freeing them is nobody's cost. Printed are medians in
milliseconds and their ratios.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from shapes import resnet1001  # type: ignore[import-not-found]  # beside this script, which is run by its path
from torch import Tensor, nn

import devconv


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def stock_default(model: nn.Module, device: torch.device) -> None:
    model.to(device)


def stock_swap(model: nn.Module, device: torch.device) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def by_flag(model: nn.Module, device: torch.device) -> None:
    with devconv.registry_conversion():
        model.to(device)


def measure(
    name: str, convert: Callable[[nn.Module, torch.device], Any], model: nn.Module, device: torch.device
) -> float:
    backend = devconv.backend_for(device.type)
    sources = [tensor.detach() for tensor in tensors_of(model)]
    *_, (path, _) = model.named_buffers()
    owner, _, key = path.rpartition(".")
    last_module = model.get_submodule(owner)
    gc.collect()
    started = time.perf_counter()
    if name == "raw batched send":
        last = backend.send(sources, device)[-1]
    else:
        convert(model, device)
        last = getattr(last_module, key)
    backend.synchronize(device)
    last.cpu()
    elapsed = time.perf_counter() - started
    if name != "raw batched send":
        assert all(tensor.device == device for tensor in tensors_of(model))
    return elapsed * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="xla")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = devconv.prepare(options.device)
    original = resnet1001()
    ways: dict[str, Callable[[nn.Module, torch.device], Any]] = {
        "stock default": stock_default,
        "stock swap": stock_swap,
        "raw batched send": lambda *_: None,
        "devconv by the flag": by_flag,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    idle: dict[str, list[float]] = {"stock no-op": [], "devconv no-op": []}
    for number in range(options.rounds + 2):
        order = list(ways)
        random.shuffle(order)
        for name in order:
            taken = measure(name, ways[name], copy.deepcopy(original), device)
            if number >= 2:
                times[name].append(taken)
    for _ in range(options.rounds):
        for name in random.sample(list(idle), 2):
            gc.collect()
            started = time.perf_counter()
            if name == "stock no-op":
                original.to("cpu")
            else:
                by_flag(original, torch.device("cpu"))
            idle[name].append((time.perf_counter() - started) * 1e3)
    medians = {name: statistics.median(values) for name, values in {**times, **idle}.items()}
    ours, raw = medians["devconv by the flag"], medians["raw batched send"]
    ratios = {
        "devconv / raw send (wanted: at most 1.4)": ours / raw,
        "faster stock mode / devconv (wanted: at least 1.2)": min(medians["stock default"], medians["stock swap"])
        / ours,
        "stock no-op / devconv no-op (wanted: at least 3)": medians["stock no-op"] / medians["devconv no-op"],
    }
    if options.json:
        print(
            json.dumps({"device": str(device), "tensors": len(tensors_of(original)), "ms": medians, "ratios": ratios})
        )
        return
    print(f"{len(tensors_of(original))} tensors, cpu -> {device}, medians of {options.rounds} interleaved rounds, ms")
    for name, value in medians.items():
        print(f"  {name:22} {value:8.1f}")
    for name, value in ratios.items():
        print(f"  {name:52} {value:6.2f}")


if __name__ == "__main__":
    main()
