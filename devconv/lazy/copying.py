"""Copies of lazy tensors: deepcopy, pickle and ``torch.save``, with device, dtype and attributes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from devconv import flag
from devconv import torch_internals as internals

from .pending import target_of

__all__ = ["allow_lazy_classes", "carry_attributes", "keep_target", "place_where_loaded"]


def carry_attributes(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``__deepcopy__``: torch's lazy buffers have none, and its lazy parameters lose their attributes."""

    @functools.wraps(stock)
    def __deepcopy__(self: Tensor, memo: dict[int, Any]) -> Tensor:  # noqa: N807 - it is one
        if not flag.active():
            return stock(self, memo)
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        twin = memo[id(self)] = type(self)(*_arguments(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    return __deepcopy__


def keep_target(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``__reduce_ex__``: torch's keeps neither device nor dtype. The file can be read without devconv."""

    @functools.wraps(stock)
    def __reduce_ex__(self: Tensor, proto: int) -> Any:  # noqa: N807 - it is one
        if not flag.active():
            return stock(self, proto)
        cls, arguments = type(self), _arguments(self)
        made = cls(*arguments).__dict__
        state = {key: value for key, value in self.__dict__.items() if key not in made}
        return internals.rebuild_with_attributes(cls, arguments, state) if state else (cls, arguments)

    return __reduce_ex__


def place_where_loaded(stock: Any) -> Any:
    """``__new__`` that minds ``torch.load(map_location=...)``, which sees storages only."""
    make = stock.__func__ if isinstance(stock, staticmethod) else stock

    @functools.wraps(make)
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is one
        if flag.active():
            if len(args) > 1 and args[1] is not None:
                args = (args[0], internals.restore_location(torch.device(args[1])), *args[2:])
            elif kwargs.get("device") is not None:
                kwargs["device"] = internals.restore_location(torch.device(kwargs["device"]))
        return make(cls, *args, **kwargs)

    return staticmethod(__new__)


def allow_lazy_classes(stock: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The classes that ``weights_only`` loading may make."""

    @functools.wraps(stock)
    def allowed() -> dict[str, Any]:
        classes = stock()
        if flag.active():
            classes.update({f"{cls.__module__}.{cls.__qualname__}": cls for cls in _CLASSES})
        return classes

    return allowed


_CLASSES = (UninitializedParameter, UninitializedBuffer)


def _arguments(tensor: Tensor) -> tuple[Any, ...]:
    arguments = (tensor.requires_grad, *target_of(tensor))
    return (*arguments, tensor.persistent) if isinstance(tensor, UninitializedBuffer) else arguments
