"""One real forward pass, for models whose shapes cannot be followed on meta.

What the pass changes is put back: buffers, training flags and generators. Initial values are drawn from a stream of
their own, so that they are the same as if nothing had been computed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from devconv import torch_internals as internals

from .generators import Generators
from .nested import map_tensors
from .pending import pending_modules
from .spec import TensorSpec
from .undo import all_or_nothing

__all__ = ["rehearse"]

Draw = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None]


def rehearse(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, devices: set[str], draw: Draw
) -> list[str]:
    """Run `model` once, calling ``draw(name, module, args, kwargs)`` for each lazy module at its first call.

    Args:
        model: the model, in the training mode that it is in.
        args: its inputs; `TensorSpec` and meta tensors become zeros on `device`.
        kwargs: its inputs by name.
        device: where stand-ins for inputs are made.
        devices: device types whose generators the pass may use.
        draw: initialises a lazy module.

    Returns:
        The device types whose generators could not be read, and are where the pass left them.
    """
    args, kwargs = map_tensors((args, kwargs), lambda leaf: _real(leaf, device))
    pending = pending_modules(model)
    streams = Generators(devices)
    for_init = streams.state()
    fresh: list[tuple[Tensor, Tensor]] = []

    def first_call(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        nonlocal for_init
        for_pass = streams.state()
        streams.restore(for_init)
        del module.__dict__[internals.INFER]
        draw(name, module, args, dict(kwargs or {}))
        for_init = streams.state()
        streams.restore(for_pass)
        # Batch norm's statistics are about to see this pass.
        fresh.extend((buffer, buffer.clone()) for buffer in module.buffers())

    training = [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers() if not nn.parameter.is_lazy(buffer)]
    try:
        with torch.no_grad(), all_or_nothing(pending.values()), _watching(pending, first_call):
            model(*args, **kwargs)
    finally:
        for module, flag in training:
            module.training = flag
        with torch.no_grad():
            for buffer, values in kept + fresh:
                if not nn.parameter.is_lazy(buffer):
                    buffer.copy_(values)
        streams.restore(for_init)
    return streams.unreadable


@contextmanager
def _watching(pending: dict[str, nn.Module], first_call: Callable[..., None]) -> Iterator[None]:
    stock: list[tuple[nn.Module, int, Any]] = []
    for name, module in pending.items():
        hook = internals.pending_handle(module).id  # type: ignore[union-attr]
        stock.append((module, hook, internals.pre_hooks_of(module)[hook]))

        def watch(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, name: str = name
        ) -> None:
            first_call(name, module, args, kwargs)

        module.__dict__[internals.INFER] = watch
        internals.pre_hooks_of(module)[hook] = watch
    try:
        yield
    finally:
        for module, hook, original in stock:
            if hook in internals.pre_hooks_of(module):
                internals.pre_hooks_of(module)[hook] = original
            module.__dict__.pop(internals.INFER, None)


def _real(leaf: Tensor | TensorSpec, device: torch.device) -> Tensor:
    if isinstance(leaf, TensorSpec):
        return leaf.empty(device)
    return torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf
