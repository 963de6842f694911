"""Putting lazy modules back: the same tensor objects, lazy again, in the same dicts, with the same hooks and class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from devconv import torch_internals as internals

from .pending import make_lazy, target_of

__all__ = ["Snapshot", "all_or_nothing"]


class Snapshot:
    """What initialising some lazy modules may change, as it was when the snapshot was taken.

    It holds no copy of a lazy tensor, since there is nothing to copy. The ordinary tensors that a lazy module holds
    itself (BatchNorm's counter) are copied, on their own device; modules inside a lazy module keep their values.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: dict[int, _ModuleState] = {}
        self._tensors: dict[int, _TensorState] = {}
        for module in modules:
            for inner in module.modules():
                if id(inner) not in self._modules:
                    self._modules[id(inner)] = _ModuleState(inner)
                    for tensor in (*internals.parameters_of(inner).values(), *internals.buffers_of(inner).values()):
                        if tensor is not None and id(tensor) not in self._tensors:
                            self._tensors[id(tensor)] = _TensorState(tensor, copied=inner is module)

    def restore(self) -> None:
        """Put everything back. Can be repeated."""
        for tensor in self._tensors.values():
            tensor.restore()
        for module in self._modules.values():
            module.restore()


@contextmanager
def all_or_nothing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave `modules` as they were if the block raises."""
    snapshot = Snapshot(modules)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


class _ModuleState:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.cls = type(module)
        self.attributes = dict(module.__dict__)
        self.tables = [(table, dict(table)) for table in internals.hook_tables(module)]
        # Lists such as an RNN's flat weights are changed in place.
        self.lists = [(value, list(value)) for value in module.__dict__.values() if isinstance(value, list)]

    def restore(self) -> None:
        self.module.__class__ = self.cls
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for table, content in self.tables:
            table.clear()
            table.update(content)
        for items, listed in self.lists:
            items[:] = listed


class _TensorState:
    def __init__(self, tensor: Tensor, *, copied: bool) -> None:
        self.tensor = tensor
        self.cls = type(tensor)
        self.attributes: dict[str, Any] = dict(tensor.__dict__)
        self.target = target_of(tensor) if is_lazy(tensor) else None
        self.requires_grad = tensor.requires_grad
        self.values = tensor.detach().clone() if copied and self.target is None else None

    def restore(self) -> None:
        tensor = self.tensor
        if self.target is not None and not (is_lazy(tensor) and target_of(tensor) == self.target):
            device, dtype = self.target
            # A swap and not `.data =`: the tensor may have been drawn on the host and be on another kind of device.
            internals.swap_impl(tensor, make_lazy(self.cls, self.requires_grad, device, dtype))
            tensor.__class__ = self.cls
        elif self.values is not None:
            with torch.no_grad():
                tensor.detach().copy_(self.values)
        tensor.__dict__.clear()
        tensor.__dict__.update(self.attributes)
