"""Checkpoints into and out of lazy modules, in all four directions.

========== =========== ====================================================================================
checkpoint model       result
========== =========== ====================================================================================
full       lazy        values on the model's device, in its dtype; a module that has everything is finished
partial    lazy        what is there is kept; the rest is initialised by the first input
lazy       lazy        nothing to copy: the model's own device and dtype stay
lazy       initialised `LazyCheckpointError`, before anything is loaded
========== =========== ====================================================================================

``assign=True`` takes the checkpoint's own tensors, except that one on another device than the lazy tensor was moved to
is sent there; a lazy tensor on meta takes any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from devconv import flag
from devconv.errors import LazyCheckpointError
from devconv.registry import resolve

from .finishing import LOADED, LOCK, finish_loaded
from .pending import is_pending, pending_modules, target_of
from .sizes import own_tensors

__all__ = ["load_one_module", "load_whole_model"]


def load_whole_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``nn.Module.load_state_dict``: refuses lazy tensors that have nowhere to go, and finishes what got everything."""

    @functools.wraps(stock)
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not flag.active() or not isinstance(state_dict, Mapping):
            return stock(self, state_dict, *args, **kwargs)
        _refuse_lazy_checkpoint(self, state_dict)
        try:
            return stock(self, state_dict, *args, **kwargs)
        finally:
            # Missing keys are an error at the end; what was loaded until then is loaded.
            with LOCK:
                for module in reversed(list(pending_modules(self).values())):
                    finish_loaded(module)

    return load_state_dict


def _refuse_lazy_checkpoint(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    lazy = [name for name, value in state_dict.items() if is_lazy(value)]
    if lazy:
        held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        held.update(model.named_buffers(remove_duplicate=False))
        misplaced = [name for name in lazy if name in held and not is_lazy(held[name])]
        if misplaced:
            raise LazyCheckpointError(misplaced)


def load_one_module(stock: Callable[..., None]) -> Callable[..., None]:
    """The loading of one module, without its children."""

    @functools.wraps(stock)
    def load(
        self: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if not flag.active() or not is_pending(self):
            return stock(self, state_dict, prefix, local_metadata, *rest)
        with LOCK:
            _load(stock, self, state_dict, prefix, local_metadata, rest)
        return None

    return load


def _load(
    stock: Callable[..., None],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    rest: tuple[Any, ...],
) -> None:
    held = own_tensors(module)
    lazy = {key: target_of(tensor)[0] for key, tensor in held.items() if is_lazy(tensor)}
    without_values = [prefix + key for key in lazy if prefix + key in state_dict and is_lazy(state_dict[prefix + key])]
    for key, device in lazy.items():
        value = state_dict.get(prefix + key)
        if local_metadata.get("assign_to_params_buffers") and isinstance(value, Tensor) and not is_lazy(value):
            state_dict[prefix + key] = _on(value, device)
    for name in without_values:
        del state_dict[name]
    stock(module, state_dict, prefix, local_metadata, *rest)
    missing = rest[1]
    missing[:] = [name for name in missing if name not in without_values]
    now = own_tensors(module)
    loaded = {key: key in lazy for key, tensor in now.items() if not is_lazy(tensor) and prefix + key in state_dict}
    module.__dict__[LOADED] = {**module.__dict__.get(LOADED, {}), **loaded}


def _on(value: Tensor, device: Any) -> Tensor:
    """`value` where the lazy tensor was moved to: a layer would otherwise be on two devices, or on the wrong one."""
    if device.type == "meta" or value.device == device:
        return value
    device, backend = resolve(device)
    if value.device.type == "cpu":
        return backend.send([value.detach()], device)[0]
    return value.detach().to(device)
