"""Shapes and storage for every lazy tensor of a model, without running the model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from devconv import torch_internals as internals
from devconv.errors import NotAModuleError, ShapeInferenceError
from devconv.registry import resolve

from .drawing import Init, draw
from .finishing import LOCK
from .outcome import MaterializedTensor, MaterializeReport
from .pending import LazyTensor, is_pending, lazy_tensors, pending_modules, target_of
from .rehearsal import rehearse
from .tracing import first_calls
from .undo import all_or_nothing

__all__ = ["fill", "materialize"]


def materialize(
    model: nn.Module,
    *inputs: Any,
    init: Init = "device",
    fallback: Literal["forward"] | None = None,
    **kwargs: Any,
) -> MaterializeReport:
    """Give every lazy tensor of a model its shape and storage, on the device it was created on or moved to.

    The model's arithmetic is not run: shapes are followed through a copy of the model on the meta device, then each
    lazy module initialises itself once, in the order of its first call. Nothing of the model's size passes through
    the host. The flag need not be on.

    Args:
        model: any module; lazy modules may be anywhere in it, and may be on several devices.
        inputs: what the model's forward takes, by position: tensors on any device (only shapes and dtypes are read),
            `TensorSpec`, other objects, or nested lists, dicts and dataclasses of these.
        init: ``"device"`` draws initial values with each device's own generator. ``"host"`` draws them on the CPU, one
            layer at a time, and sends them: one seed then gives the same values, bit by bit, on every device.
        fallback: ``"forward"`` runs one real forward pass if the shapes cannot be followed without values. Buffers,
            generators and training mode are put back after it.
        kwargs: what the model's forward takes by name.

    Returns:
        Which tensor got which shape, and which modules the inputs never reached; those stay lazy.

    Raises:
        NotAModuleError: `model` is no ``nn.Module``.
        ShapeInferenceError: the forward pass needs values (``.item()``, NumPy, control flow), with module and line.
        LazyShapeError: a tensor from a checkpoint does not fit the inputs.
        Exception: what a module's own ``initialize_parameters`` raises. After any exception every lazy module is as
            lazy as before.

    >>> from devconv import TensorSpec
    >>> model = nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(10))
    >>> report = materialize(model, TensorSpec((2, 3, 16, 16)))
    >>> model[2].in_features, report.bytes
    (1568, 63656)
    """
    if not isinstance(model, nn.Module):
        raise NotAModuleError(model)
    if init not in ("device", "host"):
        raise ValueError(f'init is "device" or "host", got {init!r}')
    if fallback not in (None, "forward"):
        raise ValueError(f'fallback is "forward" or None, got {fallback!r}')
    return fill(model, inputs, kwargs, init, fallback)


def fill(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], init: Init, fallback: str | None
) -> MaterializeReport:
    """`materialize`, with the model's own inputs by name kept apart from the options."""
    with LOCK:
        return _fill(internals.uncompiled(model), inputs, kwargs, init, fallback)


def _fill(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], init: Init, fallback: str | None
) -> MaterializeReport:
    lazy = list(lazy_tensors(model))
    pending = pending_modules(model)
    if not pending:
        return MaterializeReport(unreached=tuple(found.name for found in lazy))
    devices = _devices(model)
    notes = _traps(pending)
    layers: list[str] = []

    def initialise(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_pending(module):
            _synchronize({tensor.device for tensor in draw(module, args, kwargs, init)})
            layers.append(name)

    started = time.perf_counter()
    try:
        how = "meta"
        with all_or_nothing(pending.values()):
            calls = first_calls(model, inputs, kwargs, devices[0] if len(devices) == 1 else None)
            found = time.perf_counter()
            for call in calls:
                initialise(call.name, call.module, call.args, call.kwargs)
    except ShapeInferenceError as error:
        if fallback is None:
            raise
        how, found = "forward", started
        notes.append(f"one real forward pass was run: {error.why}")
        layers.clear()
        with all_or_nothing(pending.values()):
            unread = rehearse(model, inputs, kwargs, devices[0], {device.type for device in devices}, initialise)
            notes += [f"the generator of {kind} cannot be read, and is where the pass left it" for kind in unread]
            _synchronize(devices)
    ended = time.perf_counter()
    return MaterializeReport(
        items=tuple(_item(entry) for entry in lazy if not is_lazy(entry.tensor)),
        layers=tuple(layers),
        unreached=_unreached(model),
        how=how,
        shape_seconds=found - started,
        init_seconds=ended - found,
        notes=tuple(notes),
    )


def _devices(model: nn.Module) -> list[torch.device]:
    """Every device of the model's tensors, those of lazy tensors first."""
    devices = [target_of(entry.tensor)[0] for entry in lazy_tensors(model)]
    devices += [tensor.device for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)]
    return list(dict.fromkeys(devices)) or [torch.device("cpu")]


def _synchronize(devices: Iterable[torch.device]) -> None:
    """Storage exists when the device has made it. After every layer: a device that only records would otherwise compile
    one program for all of them, where layers of equal shapes share one."""
    for device in devices:
        indexed, backend = resolve(device)
        backend.synchronize(indexed)


def _unreached(model: nn.Module) -> tuple[str, ...]:
    waiting = pending_modules(model)
    inside = {id(inner) for module in waiting.values() for inner in module.modules()}
    return (*waiting, *(entry.name for entry in lazy_tensors(model) if id(entry.home) not in inside))


def _item(entry: LazyTensor) -> MaterializedTensor:
    tensor: Tensor = entry.tensor
    return MaterializedTensor(
        entry.name,
        type(entry.home).__name__,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        tensor.numel() * tensor.element_size(),
    )


def _traps(pending: dict[str, nn.Module]) -> list[str]:
    """Where torch's lazy classes differ from the classes that they become."""
    norms = [
        name
        for name, module in pending.items()
        if isinstance(module, nn.LazyInstanceNorm1d | nn.LazyInstanceNorm2d | nn.LazyInstanceNorm3d)
        and (module.affine or module.track_running_stats)
        and not hasattr(module, "sizes_from_tensors")
    ]
    return [
        f"{name}: torch's lazy instance norms default to affine=True and track_running_stats=True, the class that they "
        f"become to False; devconv.lazy has classes with the latter's defaults"
        for name in norms
    ]
