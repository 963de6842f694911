"""`devconv.materialize` against a real dummy forward pass: time and peak host memory, in one run.

``python ci/bench_lazy.py [--devices cpu xla] [--models resnet transformer] [--rounds 3] [--json FILE]``

Every measurement has a process of its own, and the order is shuffled in every round: recycled memory and warm compilers
decide otherwise. Times are in seconds, from a lazy model on its device to a model whose parameters have values there.
Memory is the peak of the resident set above what it was before, without the parameters themselves.

- dummy forward: a real forward pass, as stock torch initialises lazy modules.
- materialize, materialize host: `devconv.materialize` with ``init="device"`` and ``init="host"``.
- draws alone: the least that the device's own generator takes: one uniform draw for each weight of two or
  more dimensions, in a row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HOWS = ("dummy forward", "materialize", "materialize host", "draws alone")


def _resnet(device: str) -> Any:
    """ResNet-50's layers, with every convolution, norm and the head lazy."""
    import torch
    from torch import Tensor, nn

    class Bottleneck(nn.Module):
        def __init__(self, width: int, stride: int, project: bool) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.LazyConv2d(width, 1, bias=False, device=device),
                nn.LazyBatchNorm2d(device=device),
                nn.ReLU(),
                nn.LazyConv2d(width, 3, stride, 1, bias=False, device=device),
                nn.LazyBatchNorm2d(device=device),
                nn.ReLU(),
                nn.LazyConv2d(4 * width, 1, bias=False, device=device),
                nn.LazyBatchNorm2d(device=device),
            )
            self.shortcut = (
                nn.Sequential(
                    nn.LazyConv2d(4 * width, 1, stride, bias=False, device=device), nn.LazyBatchNorm2d(device=device)
                )
                if project
                else nn.Identity()
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.layers(x) + self.shortcut(x))

    blocks = [
        Bottleneck(64 << stage, 2 if stage and not block else 1, block == 0)
        for stage, depth in enumerate((3, 4, 6, 3))
        for block in range(depth)
    ]
    return nn.Sequential(
        nn.LazyConv2d(64, 7, 2, 3, bias=False, device=device),
        nn.LazyBatchNorm2d(device=device),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LazyLinear(1000, device=device),
    )


def _transformer(device: str) -> Any:
    """A decoder of 24 blocks of width 1024, 303 million parameters in lazy layers."""
    from torch import Tensor, nn
    from torch.nn import functional

    from devconv.lazy import LazyLayerNorm

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = LazyLayerNorm(device=device), LazyLayerNorm(device=device)
            self.qkv, self.out = nn.LazyLinear(3 * width, device=device), nn.LazyLinear(width, device=device)
            self.up, self.down = nn.LazyLinear(4 * width, device=device), nn.LazyLinear(width, device=device)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            widened: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
            return x + widened

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(1000, 1024, device=device)
            self.blocks = nn.Sequential(*(Block(1024, 16) for _ in range(24)))
            self.norm = LazyLayerNorm(device=device)
            self.head = nn.LazyLinear(1000, device=device)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.head(self.norm(self.blocks(self.tokens(ids))))
            return logits

    return Decoder()


MODELS = {"resnet": _resnet, "transformer": _transformer}


def _measure(model_name: str, device: str, how: str) -> dict[str, float]:
    """One measurement, in this process."""
    import torch
    from torch import nn

    import devconv

    devconv.prepare(device)
    target, backend = devconv.resolve(device)
    model = MODELS[model_name](str(target))
    spec = {
        "resnet": devconv.TensorSpec((2, 3, 224, 224)),
        "transformer": devconv.TensorSpec((1, 512), torch.int64),
    }[model_name]
    inputs = spec.empty(target)
    drawn = []
    if how == "draws alone":
        shapes_only = MODELS[model_name]("meta")
        devconv.materialize(shapes_only, spec)
        drawn = [parameter.shape for parameter in shapes_only.parameters() if parameter.dim() > 1]
    backend.synchronize(target)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    shapes = 0.0
    if how == "dummy forward":
        with torch.no_grad():
            out = model(inputs)
        backend.synchronize(target)
        del out
    elif how == "draws alone":
        model = nn.ParameterList(torch.empty(shape, device=target) for shape in drawn)
        for parameter in model.parameters():
            nn.init.uniform_(parameter)
            backend.synchronize(target)
    else:
        report = devconv.materialize(model, spec, init="host" if how.endswith("host") else "device")
        shapes = report.shape_seconds
    seconds = time.perf_counter() - started
    peak = _resident("VmHWM")
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "seconds": seconds,
        "shapes": shapes,
        "size": size / 2**20,
        "extra": (peak - before) / 2**20 - size / 2**20,
        "sum": sum(float(parameter.detach().sum().cpu()) for parameter in list(model.parameters())[:8]),
    }


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _in_a_process(model: str, device: str, how: str) -> dict[str, float]:
    variables = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", **os.environ}
    done = subprocess.run(
        [sys.executable, __file__, "--one", model, device, how],
        capture_output=True,
        text=True,
        timeout=1800,
        env=variables,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{model} on {device} by {how}:\n{done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu", "xla"])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--hows", nargs="+", default=list(HOWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "DEVICE", "HOW"))
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(_measure(*chosen.one)))
        return
    cases = [(model, device, how) for model in chosen.models for device in chosen.devices for how in chosen.hows]
    results: dict[tuple[str, str, str], list[dict[str, float]]] = defaultdict(list)
    for _ in range(chosen.rounds):
        random.shuffle(cases)
        for case in cases:
            results[case].append(_in_a_process(*case))
            print(*case, results[case][-1], file=sys.stderr, flush=True)
    print(f"{'model':12} {'device':6} {'how':18} {'seconds':>8} {'shapes':>8} {'extra MiB':>10} {'model MiB':>10}")
    rows = []
    for model, device, how in sorted(results):
        runs = results[model, device, how]
        row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rows.append({"model": model, "device": device, "how": how, **row, "runs": runs})
        print(
            f"{model:12} {device:6} {how:18} {row['seconds']:8.2f} {row['shapes']:8.3f} {row['extra']:10.1f} {row['size']:10.1f}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
