"""What is lazy in a model: modules that wait for their first input, and tensors without a shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from devconv import torch_internals as internals

__all__ = ["LazyTensor", "is_pending", "lazy_tensors", "make_lazy", "pending_modules", "target_of"]


@dataclass(frozen=True)
class LazyTensor:
    """One name of one lazy tensor. A tied tensor has several.

    Attributes:
        name: full name, as in ``named_parameters()``.
        home: the module that holds it.
        key: its name there.
        tensor: the ``UninitializedParameter`` or ``UninitializedBuffer``.
    """

    name: str
    home: nn.Module
    key: str
    tensor: Tensor


def is_pending(module: nn.Module) -> bool:
    """Whether `module` is a lazy module that has not been initialised, even if it has no lazy tensors (any more)."""
    return isinstance(module, LazyModuleMixin) and internals.pending_handle(module) is not None


def pending_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every lazy module of `model` that waits for its first input, by full name, each once."""
    return {name: module for name, module in model.named_modules() if is_pending(module)}


def lazy_tensors(model: nn.Module, prefix: str = "") -> Iterator[LazyTensor]:
    """Every name of every lazy tensor of `model`."""
    for path, module in model.named_modules(prefix=prefix):
        for table in (internals.parameters_of(module), internals.buffers_of(module)):
            for key, tensor in table.items():
                if tensor is not None and is_lazy(tensor):
                    yield LazyTensor(f"{path}.{key}" if path else key, module, key, tensor)


def make_lazy(cls: Any, requires_grad: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """A new lazy tensor of class `cls`, with its target."""
    made: Tensor = cls(requires_grad, device, dtype)
    return made


def target_of(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    """Where a lazy tensor will get its storage, and in which dtype."""
    return tensor.data.device, tensor.data.dtype
