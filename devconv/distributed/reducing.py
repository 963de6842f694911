"""What the two reducers have in common: their options, their interface, and which backward passes are still to come."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Flight", "Options", "Reducer", "tensors_in"]


@dataclass(frozen=True)
class Options:
    """How gradients are reduced; the words are those of DistributedDataParallel."""

    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False


class Reducer(Protocol):
    """Averages gradients in every backward pass between `before` and the next `before`."""

    def before(self) -> None:
        """A forward pass begins whose gradients will be averaged."""

    def after(self, output: Any) -> Any:
        """That forward pass has ended; what it returns instead of `output`."""

    def hold(self) -> None:
        """A forward pass begins whose gradients stay on this rank (`no_sync`)."""

    def close(self) -> None:
        """Let go of every parameter. Nothing is averaged afterwards."""


@dataclass
class Flight:
    """Forward passes whose gradients are to be averaged and have not been yet.

    A graph is seen through a hook on the node of each output: the node owns the hook, so a dead hook is a dead graph,
    whatever the program still holds of it.
    """

    _hooks: list[weakref.ref[_Unheard]] = field(default_factory=list)

    def start(self, output: Any) -> None:
        """A forward pass has produced `output`."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                hook = _Unheard()
                tensor.grad_fn.register_hook(hook)
                self._hooks.append(weakref.ref(hook))

    def land(self) -> None:
        """Gradients are being averaged."""
        self._hooks.clear()

    @property
    def in_air(self) -> bool:
        """Whether a backward pass could still come."""
        self._hooks = [hook for hook in self._hooks if hook() is not None]
        return bool(self._hooks)


class _Unheard:
    """A hook that only shows, by being alive, that its node is."""

    def __call__(self, *gradients: Any) -> None:
        return None


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples, dicts and dataclasses.

    >>> import torch
    >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]
