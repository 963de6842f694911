"""Counts: every lazy class x every way between devices and dtypes x every door, kept or lost.

``python -m tests.lazy.matrix [--stock]`` prints one line for each way and door, and the sums. A cell is kept if every
lazy tensor is still lazy, the object it was, with its attributes and its new target; and if the module then gets its
tensors there, in that dtype, held by the optimizer that was built before.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import devconv
from tests.lazy.conftest import DEVICES, flag_on
from tests.lazy.zoo import KINDS, Kind

Door = Callable[[nn.Module, torch.device, torch.dtype], object]


@dataclass(frozen=True)
class Way:
    """A sequence of devices, and the dtype at its end."""

    name: str
    devices: tuple[str, ...]
    dtype: torch.dtype = torch.float32


def ways() -> Iterator[Way]:
    """Every way that the lane can go, there and back."""
    real = [name for name in DEVICES if name != "meta"]
    for dtype in (torch.bfloat16, torch.float64):
        yield from (Way(f"{name} {str(dtype)[6:]}", (name,), dtype) for name in DEVICES)
    for name in DEVICES[1:]:
        yield Way(f"cpu -> {name}", ("cpu", name))
        yield Way(f"cpu -> {name} -> cpu", ("cpu", name, "cpu"))
        yield Way(f"{name} -> cpu", (name, "cpu"))
        yield Way(f"cpu -> {name} bfloat16", ("cpu", name), torch.bfloat16)
    for name in real[1:]:
        yield Way(f"cpu -> meta -> {name}", ("cpu", "meta", name))
        yield Way(f"{name} -> meta -> {name}", (name, "meta", name))
    yield Way("cpu -> meta -> cpu", ("cpu", "meta", "cpu"))


def doors(way: Way) -> dict[str, Door]:
    """The doors that such a way can take."""
    found: dict[str, Door] = {
        "to": lambda m, device, dtype: m.to(device, dtype),
        "convert": lambda m, device, dtype: devconv.convert(m, device, dtype),
        "lambda": lambda m, device, dtype: m._apply(lambda t: t.to(device, dtype if t.is_floating_point() else None)),
    }
    if way.dtype is torch.float32:
        found["to_empty"] = lambda m, device, dtype: m.to_empty(device=device)
    if len(way.devices) == 1:
        name = {torch.bfloat16: "bfloat16", torch.float64: "double"}[way.dtype]
        found = {name: lambda m, device, dtype: getattr(m, name)(), **found}
        found["type"] = lambda m, device, dtype: m.type(dtype)
    return found


def kept(kind: Kind, way: Way, door: Door, *, by_devconv: bool) -> bool:
    """Whether one cell is kept."""
    start, *stops = way.devices
    module = kind.make(device=start)
    module.requires_grad_(True) if by_devconv else None
    counter = {"num_batches_tracked"} & module._buffers.keys() if "meta" in way.devices else set()
    # An ordinary tensor has no value on meta and cannot come back; the lazy ones are what is counted here.
    module._buffers.update(dict.fromkeys(counter))
    optimizer = torch.optim.SGD(module.parameters(), 0.1) if any(True for _ in module.parameters()) else None
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    lazy = {name for name, tensor in held.items() if is_lazy(tensor)}
    for name in lazy:
        held[name].tag = name
    target = torch.device(way.devices[-1])
    for stop in stops or [start]:
        door(module, torch.device(stop), way.dtype)
    now = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in lazy:
        tensor = now[name]
        if not is_lazy(tensor) or tensor is not held[name] or tensor.tag != name:
            return False
        if (tensor.data.device, tensor.data.dtype) != (target, way.dtype):
            return False
    module._buffers.update({name: torch.zeros((), dtype=torch.int64, device=target) for name in counter})
    inputs = kind.inputs(target, way.dtype)
    if by_devconv:
        devconv.materialize(module, *inputs)
    else:
        module(*inputs)
    now = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    right = all((now[name].device, now[name].dtype) == (target, way.dtype) for name in lazy)
    if optimizer is not None:
        right &= {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in module.parameters()}
    return right and type(module) is type(kind.eager())


@contextmanager
def _future(flag: str) -> Iterator[None]:
    setter = getattr(torch.__future__, f"set_{flag}_module_params_on_conversion", None)
    if setter is not None:
        setter(True)
    try:
        yield
    finally:
        if setter is not None:
            setter(False)


def count(mode: str) -> tuple[int, int]:
    """Kept and all cells of one mode, with a line for each way and door."""
    total_kept = total = 0
    for way in ways():
        for name, door in doors(way).items():
            if mode != "devconv" and name == "convert":
                continue
            lost = []
            for key, kind in KINDS.items():
                with flag_on() if mode == "devconv" else nullcontext(), _future(mode):
                    try:
                        if not kept(kind, way, door, by_devconv=mode == "devconv"):
                            lost.append(key)
                    except Exception as error:  # noqa: BLE001 - a cell that raises is lost
                        lost.append(f"{key} ({type(error).__name__})")
            good = len(KINDS) - len(lost)
            total_kept, total = total_kept + good, total + len(KINDS)
            print(f"{mode:10} {way.name:26} {name:10} {good:3} / {len(KINDS)}  {', '.join(lost[:3])}", flush=True)
    print(f"{mode}: kept {total_kept} of {total}", flush=True)
    return total_kept, total


def main() -> None:
    """Count for devconv, and with ``--stock`` for torch's three modes too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", action="store_true")
    modes = ("devconv", "default", "overwrite", "swap") if parser.parse_args().stock else ("devconv",)
    warnings.simplefilter("ignore")
    for device in DEVICES:
        devconv.prepare(device)
    sums = {mode: count(mode) for mode in modes}
    for mode, (good, total) in sums.items():
        print(f"{mode:10} {good:5} / {total}")


if __name__ == "__main__":
    main()
