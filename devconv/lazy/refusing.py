"""What needs shapes and cannot wait for them: refused at once, with the tensors' names and the line that cures it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from devconv import flag
from devconv.errors import UninitializedTensorError

from .naming import name_in, tensor_name
from .pending import lazy_tensors, pending_modules

__all__ = [
    "CURE",
    "catch_up",
    "refuse_functional_call",
    "refuse_lazy",
    "refuse_module",
    "refuse_original",
    "refuse_parameters",
    "refuse_tensor",
]

CURE = "Call devconv.materialize(model, *example_inputs) first."


def refuse_lazy(module: nn.Module, action: str) -> None:
    """Raise if anything in `module` is lazy.

    Args:
        module: any module.
        action: what was to be done, as the start of a sentence: ``"replicate"``.

    Raises:
        UninitializedTensorError: with the full names, and the line that makes `action` possible.
    """
    names = [entry.name for entry in lazy_tensors(module)] or list(pending_modules(module))
    if names:
        raise UninitializedTensorError(names, action, CURE)


def refuse_parameters(stock: Callable[..., None]) -> Callable[..., None]:
    """The constructor of an optimizer that looks at its parameters' shapes."""

    @functools.wraps(stock)
    def __init__(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        if flag.active():
            params = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else params
            names = list(_lazy_parameters(params))
            if names:
                raise UninitializedTensorError(names, f"the constructor of {type(self).__name__}", CURE)
        stock(self, params, *args, **kwargs)

    return __init__


def _lazy_parameters(params: Any) -> Iterable[str]:
    for number, group in enumerate(params):
        members = group["params"] if isinstance(group, dict) else [group]
        for position, member in enumerate([members] if isinstance(members, Tensor) else list(members)):
            name, tensor = member if isinstance(member, tuple) else ("", member)
            if is_lazy(tensor):
                yield name or tensor_name(tensor, f"parameter {position} of group {number}")


def refuse_module(action: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A constructor whose first argument is a module that must not be lazy."""

    def replace(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def __init__(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is one
            if flag.active() and isinstance(module, nn.Module):
                refuse_lazy(module, action)
            return stock(self, module, *args, **kwargs)

        return __init__

    return replace


def refuse_tensor(action: str, default: str | None = None) -> Callable[[Any], Any]:
    """A function of a module and the name of one of its tensors, which must not be lazy."""

    def replace(stock: Any) -> Any:
        kind = type(stock) if isinstance(stock, staticmethod | classmethod) else None
        function = stock.__func__ if kind is not None else stock

        @functools.wraps(function)
        def apply(*args: Any, **kwargs: Any) -> Any:
            if flag.active():
                given = args[1:] if kind is classmethod else args
                module = given[0] if given else kwargs.get("module")
                name = given[1] if len(given) > 1 else kwargs.get("name", default)
                tensor = getattr(module, name, None) if isinstance(name, str) else None
                if isinstance(module, nn.Module) and isinstance(tensor, Tensor) and is_lazy(tensor):
                    raise UninitializedTensorError([name_in(module, str(name))], action, CURE)
            return function(*args, **kwargs)

        return apply if kind is None else kind(apply)

    return replace


def refuse_original(stock: Callable[..., None]) -> Callable[..., None]:
    """``ParametrizationList``: the one place that ``register_parametrization`` passes, however it was imported."""

    @functools.wraps(stock)
    def __init__(self: Any, modules: Any, original: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        if flag.active() and is_lazy(original):
            raise UninitializedTensorError([tensor_name(original, "a lazy tensor")], "register_parametrization", CURE)
        stock(self, modules, original, *args, **kwargs)

    return __init__


def refuse_functional_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``functional_call`` would initialise a lazy module with the caller's tensors, and put the lazy ones back."""

    @functools.wraps(stock)
    def swap(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        if flag.active() and isinstance(module, nn.Module):
            refuse_lazy(module, "functional_call")
        return stock(module, *args, **kwargs)  # type: ignore[no-any-return]

    return swap


def catch_up(stock: Callable[..., None]) -> Callable[..., None]:
    """``AveragedModel.update_parameters``: an average that was made of a lazy model gets the model's shapes first."""

    @functools.wraps(stock)
    def update_parameters(self: Any, model: nn.Module) -> None:
        if flag.active() and (any(lazy_tensors(self.module)) or pending_modules(self.module)):
            refuse_lazy(model, "averaging a model")
            with torch.no_grad():
                self.module.load_state_dict(model.state_dict())
        stock(self, model)

    return update_parameters
