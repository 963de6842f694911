"""Where a lazy module's first values are drawn: on its own device, or on the host and then sent."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from devconv import torch_internals as internals
from devconv.errors import ShapeInferenceError
from devconv.registry import resolve

from .finishing import finish
from .naming import module_name
from .nested import tensors_in
from .pending import lazy_tensors, make_lazy, target_of
from .tracing import FALLBACK, OnDevice

__all__ = ["Init", "draw"]

Init = Literal["device", "host"]


def draw(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], init: Init) -> list[Tensor]:
    """Initialise one lazy module where its tensors are to be.

    Args:
        module: a pending lazy module.
        args: its first inputs, on meta or real.
        kwargs: its first inputs by name.
        init: ``"device"`` draws with each device's own generator; ``"host"`` with the CPU's, so that one seed gives
            the same values on every device.

    Returns:
        The tensors that got a shape.

    Raises:
        ShapeInferenceError: the module made a tensor from the values of inputs that have none.
    """
    lazy = list({id(found.tensor): found.tensor for found in lazy_tensors(module)}.values())
    targets = [target_of(tensor) for tensor in lazy]
    away = [
        (tensor, device)
        for tensor, (device, _) in zip(lazy, targets, strict=True)
        if init == "host" and device.type not in ("cpu", "meta")
    ]
    for tensor, _ in away:
        _to_host(tensor)
    seen = torch.device("cpu") if away else next((device for device, _ in targets), None)
    shapes_only = seen is not None and seen.type != "meta" and any(leaf.is_meta for leaf in tensors_in((args, kwargs)))
    try:
        with OnDevice(seen) if shapes_only else nullcontext():
            finish(module, args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if shapes_only and "meta" in str(error):
            raise _needs_values(module) from error
        raise
    if shapes_only and any(tensor.is_meta for tensor in lazy):
        raise _needs_values(module)
    for tensor, device in away:
        _send(tensor, device)
    if away and isinstance(module, nn.RNNBase):
        module.flatten_parameters()
    return lazy


def _needs_values(module: nn.Module) -> ShapeInferenceError:
    return ShapeInferenceError(
        module_name(module), "", "its initialize_parameters reads the values of its inputs", FALLBACK
    )


def _to_host(tensor: Tensor) -> None:
    dtype = target_of(tensor)[1]
    internals.swap_impl(tensor, make_lazy(type(tensor), tensor.requires_grad, "cpu", dtype))


def _send(tensor: Tensor, device: torch.device) -> None:
    """One tensor at a time: the host's copy is let go before the next one is sent."""
    device, backend = resolve(device)
    (sent,) = backend.send([tensor.detach()], device)
    internals.swap_impl(tensor, sent.requires_grad_(tensor.requires_grad))
