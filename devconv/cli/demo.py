"""``devconv demo``: a real model is fine-tuned on the CPU, and on a device with stock torch and with devconv."""

from __future__ import annotations

import json as json_format
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import devconv

from .extras import need
from .screen import stderr, stdout, stop

if TYPE_CHECKING:
    import torch

    from .minilm import Task
    from .training import Column, Way

__all__ = ["demo"]

_DIFFERENT = 1


def demo(
    device: Annotated[str, typer.Option(help="the target, such as cuda; meta shows the plan and the shapes")] = "xla",
    steps: Annotated[int, typer.Option(help="optimizer steps of each column", min=1)] = 8,
    plot: Annotated[Path, typer.Option(help="where the loss curves go; the ending says which kind of picture")] = Path(
        "devconv-demo.png"
    ),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="draw no picture")] = False,
    seed: Annotated[int, typer.Option(help="for the new parts of the model's head and for the masked words")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print a JSON object and nothing else")] = False,
) -> None:
    """Fine-tune MiniLM on the CPU, on a device with stock torch, and there with devconv; compare the losses.

    Exit status: 0 if devconv's losses are the CPU's, 1 if they are not, 2 if the demo could not start.
    """
    from .minilm import PACKAGES, load

    try:
        # Starts the runtime before the first backward pass, which is the CPU's.
        target = devconv.prepare(device)
    except devconv.DevconvError as error:
        stop(f"{error}{_another(device)}")
    picture = None if no_plot or target.type == "meta" else plot
    if picture is not None:
        _check_picture(picture)
    need(PACKAGES, "demo")
    with stderr().status("loading the checkpoint"):
        task = load(seed)
    if target.type == "meta":
        _examine(task, target, json=json)
    else:
        _compare(task, target, steps, seed, picture, json=json)


def _another(device: str) -> str:
    if device != "xla" or find_spec("torch_xla"):
        return ""
    return (
        ' All that the demo needs comes with: pip install "devconv[xla,demo]". Or name another target: '
        "devconv demo --device cpu"
    )


def _check_picture(path: Path) -> None:
    """Before minutes of training, not after them."""
    need(("matplotlib",), "demo", " (or pass --no-plot)")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        stop(f"--plot {path}: matplotlib writes no such picture. Use one of: {', '.join(sorted(kinds))}")
    folder = path.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        stop(f"--plot {path}: {folder} is no folder that can be written to. Name another place, or pass --no-plot")


def _examine(task: Task, target: torch.device, *, json: bool) -> None:
    from .shapes import examine

    found = examine(task, target)
    if json:
        _print_json({"device": str(target), "ok": found.holds, **found.to_dict()})
    else:
        found.show(stdout())
    if not found.holds:
        stop("devconv's model is not the one that was loaded", _DIFFERENT)


def _compare(task: Task, target: torch.device, steps: int, seed: int, picture: Path | None, *, json: bool) -> None:
    from .training import Way
    from .verdict import TOLERANCE, farthest, holds, stock_in_one_sentence

    cpu, stock, ours = columns = [_train(task, way, target, steps) for way in Way]
    sentence, ok = stock_in_one_sentence(stock, cpu), holds(ours, cpu)
    if not json:
        _show(columns, sentence)
    if picture is not None:
        from .picture import paint

        paint(columns, picture)
    if json:
        report = {
            "device": str(target),
            "steps": steps,
            "seed": seed,
            "ok": ok,
            "tolerance": TOLERANCE,
            "farthest": {str(column.way): farthest(column.losses, cpu.losses) for column in columns[1:]},
            "stock": sentence,
            "plot": None if picture is None else str(picture),
            "columns": {str(column.way): asdict(column) for column in columns},
        }
        _print_json(report)
    elif picture is not None:
        stdout().print(f"The curves are in {picture}.")
    if not ok:
        reason = ours.error or f"its losses are up to {farthest(ours.losses, cpu.losses):.1e} away (relative)"
        stop(f"devconv did not train as the CPU does on {target}: {reason}; {TOLERANCE:g} is allowed", _DIFFERENT)


def _train(task: Task, way: Way, target: torch.device, steps: int) -> Column:
    import torch

    from .series import titled
    from .training import Way, train

    device = torch.device("cpu") if way is Way.CPU else target
    where = {Way.CPU: "CPU", Way.STOCK: f"{target}, stock torch", Way.DEVCONV: f"{target}, devconv"}[way]
    screen = stderr()
    with screen.status(f"{where}: moving, first step") as status:
        column = train(task, way, device, steps, lambda done: status.update(f"{where}: step {done} of {steps}"))
    screen.print(f"{titled(column)}: {len(column.losses)} steps in {column.seconds:.1f} s")
    return column


def _show(columns: Sequence[Column], sentence: str) -> None:
    from .chart import draw
    from .comparison import compare

    screen = stdout()
    screen.print(compare(columns))
    screen.print(draw(columns, screen.width))
    screen.print(f"\n{sentence}")


def _print_json(report: dict[str, Any]) -> None:
    print(json_format.dumps(_writable(report), indent=2, allow_nan=False))


def _writable(value: Any) -> Any:
    """JSON has no word for infinite and undefined numbers: null."""
    if isinstance(value, dict):
        return {key: _writable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
