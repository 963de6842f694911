"""A copy of a model on the meta device: the same modules and attributes, no data.

It is a deep copy in which every tensor is replaced on the way, also those that are plain attributes of modules. What
cannot be copied (locks, files, process groups) is shared with the model, since a forward pass leaves it as it was.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from devconv import torch_internals as internals

from .pending import make_lazy, target_of

__all__ = ["Shadow", "meta_twin"]


class Shadow:
    """A model's copy on meta.

    Attributes:
        module: the copy.
        names: full name of every module of the copy and of the model, by id.
        twins: the copy's module for each module of the model, by id.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        memo: dict[int, Any] = {}
        for _, module in named:
            for tensor in (*internals.parameters_of(module).values(), *internals.buffers_of(module).values()):
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = meta_twin(tensor)
        with _TensorsToMeta(), torch.no_grad():
            self.module = _copy(model, [module for _, module in named], memo)
        self.twins: dict[int, nn.Module] = {id(module): memo.get(id(module), module) for _, module in named}
        self.names = {id(module): name for name, module in named}
        self.names.update((id(self.twins[id(module)]), name) for name, module in named)
        self.module = _without_compilation(self.module)


def meta_twin(tensor: Tensor) -> Tensor:
    """`tensor` on meta: shape, strides, dtype, class and attributes, no data and no transfer."""
    twin: Tensor
    if is_lazy(tensor):
        twin = make_lazy(type(tensor), tensor.requires_grad, "meta", target_of(tensor)[1])
    else:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        with torch.no_grad():
            twin = (
                torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
                if plain
                else tensor.detach().to("meta")
            )
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin


class _TensorsToMeta(TorchFunctionMode):
    """While a model is copied, tensors that no module registered become meta tensors too."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = meta_twin(tensor)
            return memo[id(tensor)]
        if func is Tensor.clone:
            # A parameter in a plain list copies itself by cloning its data.
            return meta_twin(args[0])
        return func(*args, **(kwargs or {}))


def _copy(model: nn.Module, modules: list[nn.Module], memo: dict[int, Any]) -> nn.Module:
    tensors = dict(memo)
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # noqa: BLE001 - any object's own copying can fail in any way
        shared = _what_cannot_be_copied(modules, tensors)
        memo.clear()
        memo.update(tensors)
        memo.update(shared)
        return copy.deepcopy(model, memo)


def _what_cannot_be_copied(modules: list[nn.Module], tensors: dict[int, Any]) -> dict[int, Any]:
    """Attributes of modules whose copying fails, as a memo that keeps them as they are."""
    inside = dict(tensors)
    inside.update((id(module), module) for module in modules)
    shared: dict[int, Any] = {}
    for module in modules:
        for value in module.__dict__.values():
            try:
                copy.deepcopy(value, dict(inside))
            except Exception:  # noqa: BLE001 - as above
                shared[id(value)] = value
    return shared


def _without_compilation(model: nn.Module) -> nn.Module:
    """The copy runs eagerly: compiling something that computes nothing would only take time."""
    for module in model.modules():
        internals.forget_compilation(module)
        children = internals.children_of(module)
        for name, child in children.items():
            if child is not None:
                children[name] = internals.uncompiled(child)
    return internals.uncompiled(model)
