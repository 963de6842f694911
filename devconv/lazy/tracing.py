"""Following a model's shapes on its meta copy: what each lazy module is called with first.

The copy's tensors are on meta, but say that they are on the model's device, so that code which asks
(``torch.arange(n, device=x.device)``, ``torch.autocast(x.device.type)``) takes the path that it will take later. Small
tensors that a forward pass makes on the CPU stay real, so that host arithmetic on shapes works, until they meet a meta
tensor.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.overrides import TorchFunctionMode

from devconv import torch_internals as internals
from devconv.errors import ShapeInferenceError

from .blank import draws
from .finishing import finish
from .generators import quiet
from .nested import map_tensors
from .pending import is_pending
from .shadow import Shadow, meta_twin
from .shortcuts import shortcut
from .spec import TensorSpec
from .undo import all_or_nothing

__all__ = ["FALLBACK", "Call", "OnDevice", "first_calls"]

_CLOSURE = "a closure called a module of the model itself, where a copy of the model was being followed"
FALLBACK = 'Pass fallback="forward" to run one real forward pass instead.'


@dataclass(frozen=True)
class Call:
    """The first call of one lazy module.

    Attributes:
        module: the module of the model, not of its copy.
        name: its full name.
        args: positional inputs on meta.
        kwargs: inputs by name, on meta.
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def first_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None
) -> list[Call]:
    """The first call of every lazy module that a forward pass reaches, in the order of the pass.

    Args:
        model: the model; it is not run and not changed.
        args: its inputs: tensors on any device, or `TensorSpec`.
        kwargs: its inputs by name.
        device: where the model is, None if on several devices.

    Returns:
        The calls, with inputs on meta.

    Raises:
        ShapeInferenceError: the pass needs values, with the module and the line.
    """
    shadow = Shadow(model)
    pending = [module for module in model.modules() if is_pending(module)]
    calls: list[Call] = []
    for module in pending:
        _record(shadow.twins[id(module)], module, shadow.names[id(module)], calls)
    args, kwargs = map_tensors((args, kwargs), _input_twin)
    # A closure that holds the model's own modules would initialise them with inputs of the copy.
    with all_or_nothing(pending):
        try:
            with quiet(), torch.no_grad(), _Following(device):
                shadow.module(*args, **kwargs)
        except Exception as error:
            name, line = place_of(error, shadow.names)
            why = f"{type(error).__name__}: {_first_line(error)}"
            raise ShapeInferenceError(name, line, why, FALLBACK) from error
        for module in pending:
            if not is_pending(module):
                raise ShapeInferenceError(shadow.names[id(module)], "", _CLOSURE, FALLBACK)
    return calls


def _input_twin(leaf: Tensor | TensorSpec) -> Tensor:
    return leaf.empty("meta") if isinstance(leaf, TensorSpec) else meta_twin(leaf)


def _record(twin: nn.Module, module: nn.Module, name: str, calls: list[Call]) -> None:
    def first_call(twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        calls.append(Call(module, name, tuple(args), dict(kwargs or {})))
        del twin.__dict__[internals.INFER]
        finish(twin, args, dict(kwargs or {}))

    # Under the name too: forward hooks are not the only way to initialise a lazy module.
    twin.__dict__[internals.INFER] = first_call
    internals.pre_hooks_of(twin)[internals.pending_handle(twin).id] = first_call  # type: ignore[union-attr]


class OnDevice(TorchFunctionMode):
    """Lets code that asks meta tensors for their device believe that it runs on `device`."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        # Getters are made anew on every access: equal and of equal hash, but not the same object.
        self._answers: dict[Any, Any] = {}
        if device is not None:
            self._answers = {getter: kind == device.type for getter, kind in _KINDS.items()} | {_DEVICE: device}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in self._answers and args[0].is_meta and _has_shape(args[0]):
            return self._answers[func]
        return func(*args, **(kwargs or {}))


def _has_shape(tensor: Tensor) -> bool:
    """False for what a lazy tensor itself looks at to find its device, where the truth is needed: its ``data``, empty,
    which for a buffer is lazy too."""
    return isinstance(tensor, UninitializedParameter) or (not is_lazy(tensor) and tensor.numel() > 0)


class _Following(OnDevice):
    """Keeps a forward pass of the copy on meta, wherever its code wants to put tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GETTERS:
            return super().__torch_function__(func, types, args, kwargs)
        if func in _MOVES:
            return _moved(func, args, kwargs)
        if draws(func):
            # On meta there is nothing to fill, and torch's kernels for it are slow.
            tensor = args[0] if args else kwargs["tensor"]
            return tensor if tensor.is_meta else func(*args, **kwargs)
        if kwargs.get("device") is not None and self._is_the_models(kwargs["device"]):
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"} | {"device": "meta"}
        kinds = set(_kinds((args, kwargs)))
        if None in kinds:
            raise RuntimeError(_CLOSURE)
        if kinds == {True}:
            result = shortcut(func, args, kwargs)
            if result is not None:
                return result
        if kinds == {True, False}:
            # Some operations want a tensor on the host (a packed sequence's batch sizes): as little as possible moves.
            for chosen in (_nothing, torch.is_floating_point):
                try:
                    return func(*_to_meta(args, chosen), **_to_meta(kwargs, chosen))
                except RuntimeError:
                    continue
            args, kwargs = _to_meta(args, _everything), _to_meta(kwargs, _everything)
        return func(*args, **kwargs)

    def _is_the_models(self, device: Any) -> bool:
        """What is made on the device that the model is believed to be on belongs to meta; the rest is host arithmetic."""
        device = torch.device(device)
        return bool(device.type != "cpu" or device == self._answers.get(_DEVICE))


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_DEVICE = _getter("device")
_KINDS = {_getter(f"is_{kind}"): kind for kind in ("cuda", "cpu", "xla")}
_GETTERS = frozenset({_DEVICE, *_KINDS, *map(_getter, ("shape", "dtype", "data", "is_meta"))})
_MOVES = frozenset(
    function
    for function in (getattr(Tensor, name, None) for name in ("to", "cuda", "cpu", "xpu", "ipu", "mtia"))
    if function is not None
)


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A transfer of a meta tensor is a cast at most; a transfer of a real one to a device makes it meta."""
    tensor = args[0]
    if func is Tensor.cpu:
        return tensor if tensor.is_meta else func(*args, **kwargs)
    if func is not Tensor.to:
        return tensor if tensor.is_meta else meta_twin(tensor)
    other = args[1] if len(args) > 1 else kwargs.get("other")
    device: torch.device | None
    dtype: torch.dtype | None
    if isinstance(other, Tensor):
        device, dtype, memory_format = other.device, other.dtype, kwargs.get("memory_format")
    else:
        options = {key: value for key, value in kwargs.items() if key != "copy"}
        device, dtype, _, memory_format = internals.parse_to(*args[1:4], **options)
    if not tensor.is_meta and device is not None and device.type != "cpu":
        tensor = meta_twin(tensor)
    return tensor.to(
        dtype=tensor.dtype if dtype is None else dtype,
        memory_format=torch.preserve_format if memory_format is None else memory_format,
    )


def _kinds(value: Any) -> Iterator[bool | None]:
    """Whether each tensor in the arguments of an operation is on meta; None for a lazy tensor of the model itself."""
    if isinstance(value, Tensor):
        yield None if is_lazy(value) and not value.is_meta else value.is_meta
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _kinds(item)
    elif isinstance(value, dict):
        yield from _kinds(tuple(value.values()))


def _to_meta(value: Any, chosen: Callable[[Tensor], bool]) -> Any:
    if isinstance(value, Tensor):
        return meta_twin(value) if not value.is_meta and chosen(value) else value
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(_to_meta(item, chosen) for item in value)
    return {key: _to_meta(item, chosen) for key, item in value.items()} if isinstance(value, dict) else value


def _nothing(tensor: Tensor) -> bool:
    return False


def _everything(tensor: Tensor) -> bool:
    return True


def place_of(error: BaseException, names: dict[int, str]) -> tuple[str, str]:
    """Where a forward pass failed.

    Returns:
        The full name of the innermost module, and ``file:line, `code` `` of the innermost line of the user's.
    """
    module_name, line = "", ""
    for frame, number in _frames(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            name = names[id(owner)]
            module_name = f"{name} ({type(owner).__name__})" if name else type(owner).__name__
        file = Path(frame.f_code.co_filename)
        if not any(home in file.parents for home in _NOT_THE_USERS):
            code = linecache.getline(str(file), number).strip()
            line = f"{file.name}:{number}" + (f", `{code}`" if code else "")
    return module_name, line


_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parent.parent)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")
