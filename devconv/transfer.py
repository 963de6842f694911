"""What a conversion asks of each tensor, and how to read it out of the function that ``_apply`` gets.

A pure transfer is recognised exactly or not at all: by the identity of a code object that stock torch's own doors use,
or by byte code that can do nothing but call one conversion method on its argument. No function is tried out on a
tensor, since a function may count its calls or tell its tensors apart.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_internals as internals

__all__ = ["Transfer", "capture", "recognise"]


@dataclass(frozen=True)
class Transfer:
    """A pure conversion: the same device, dtype and memory format for every tensor.

    Attributes:
        device: the target, None to stay.
        dtype: the target for the tensors that `casts` selects, None to keep every dtype.
        casts: ``"floating"``, ``"inexact"`` (floating and complex) or ``"all"``.
        memory_format: for tensors of 4 or 5 dimensions, None to keep strides.
        non_blocking: the copies need not be complete on return.
        empty: only shapes are wanted (``to_empty``).
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    casts: str = "inexact"
    memory_format: torch.memory_format | None = None
    non_blocking: bool = False
    empty: bool = False

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a tensor of `dtype` becomes.

        >>> Transfer(dtype=torch.float64).dtype_for(torch.int64)
        torch.int64
        """
        if self.dtype is None:
            return dtype
        if dtype.is_floating_point or self.casts == "all" or (self.casts == "inexact" and dtype.is_complex):
            return self.dtype
        return dtype

    def apply(self, tensor: Tensor) -> Tensor:
        """Stock torch's own conversion of one tensor."""
        device = self.device if self.device is not None else tensor.device
        if self.empty:
            return torch.empty_like(tensor, device=device)
        dtype = self.dtype_for(tensor.dtype)
        if self.memory_format is not None and tensor.dim() in (4, 5):
            return tensor.to(device, dtype, self.non_blocking, memory_format=self.memory_format)
        return tensor.to(device, dtype, self.non_blocking)

    def on(self, device: torch.device) -> Transfer:
        """The same transfer with its device resolved."""
        return replace(self, device=device)

    def __str__(self) -> str:
        parts = [str(part) for part in (self.device, self.dtype, self.memory_format) if part is not None]
        return (", ".join(parts) or "nothing") + (" (empty)" if self.empty else "")


class _Catcher(nn.Module):
    """A module whose ``_apply`` keeps what a door hands to it."""

    fn: Callable[[Tensor], Tensor] | None = None
    recurse = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Catcher:
        self.fn, self.recurse = fn, recurse
        return self


def capture(
    door: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[Tensor], Tensor] | None, bool]:
    """What a front door of ``nn.Module`` hands to ``_apply`` for these arguments: the function, and ``recurse``.

    So torch's own doors check their own arguments, the explicit form and the flag take one path, and modules that read
    the function's name find the usual one.

    Raises:
        TypeError: torch's own, for arguments that the door refuses.
    """
    catcher = _Catcher()
    door(catcher, *args, **kwargs)
    return catcher.fn, catcher.recurse


_CODES = internals.door_codes()
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_DEVICES = ("cuda", "xpu", "ipu", "mtia")


def recognise(fn: Callable[[Tensor], Tensor]) -> Transfer | None:
    """The transfer that `fn` is, None if it may be anything else.

    >>> recognise(lambda t: t.to("meta"))
    Transfer(device=device(type='meta'), dtype=None, casts='all', memory_format=None, non_blocking=False, empty=False)
    >>> recognise(lambda t: t.to("meta") if t.dim() == 2 else t) is None
    True
    """
    code = getattr(fn, "__code__", None)
    if code is None or not isinstance(fn, FunctionType):
        return None
    door = _CODES.get(code)
    if door is None:
        return _read_lambda(fn)
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)}
    if door == "to":
        return Transfer(
            cells["device"], cells["dtype"], "inexact", cells["convert_to_format"], non_blocking=cells["non_blocking"]
        )
    if door in _CASTS:
        return Transfer(None, _CASTS[door], "floating")
    if door == "cpu":
        return Transfer(torch.device("cpu"))
    if door in _DEVICES:
        return Transfer(_device(door, cells["device"]))
    if door == "type":
        dtype = cells["dst_type"]
        return Transfer(None, dtype, "all") if isinstance(dtype, torch.dtype) else None
    if door == "to_empty":
        return Transfer(None if cells["device"] is None else torch.device(cells["device"]), empty=True)
    return None


def _device(device_type: str, device: int | str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device(device_type)
    return torch.device(device_type, device) if isinstance(device, int) else torch.device(device)


# Byte code that loads names and constants and calls once. Whatever is not listed makes a function opaque, so a newer
# Python costs speed and never correctness.
_ARGUMENT = {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"}
_NAMES = {"LOAD_CONST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_SMALL_INT"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_SILENT = {"RESUME", "PRECALL", "KW_NAMES", "PUSH_NULL", "COPY_FREE_VARS", "CACHE", "NOP", "RETURN_VALUE", "NOT_TAKEN"}
_CALLS = {"CALL", "CALL_KW"}


def _read_lambda(fn: FunctionType) -> Transfer | None:
    code = fn.__code__
    if code.co_argcount != 1 or code.co_kwonlyargcount or code.co_flags & 0x0C or fn.__defaults__:
        return None
    seen: list[dis.Instruction] = []
    calls = 0
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in _SILENT:
            continue
        if name in _CALLS:
            calls += 1
        elif name in _ATTRIBUTES:
            # The method of the argument, or a module's attribute; any other could be a property that runs code.
            before = seen[-1] if seen else None
            if before is None or not (before.opname in _ARGUMENT or _is_module(fn, before)):
                return None
        elif name not in _NAMES and name not in _ARGUMENT:
            return None
        seen.append(instruction)
    # The argument is loaded first and once, and one call is made: it can only be `t.method(names and constants)`.
    arguments = [instruction.opname in _ARGUMENT for instruction in seen]
    if calls != 1 or not arguments[0] or sum(arguments) != 1:
        return None
    recorder = _Recorder()
    try:
        token = fn(recorder)
    except Exception:  # noqa: BLE001 - whatever it is, the real call will raise it where the user expects it
        return None
    return recorder.transfer if token is recorder else None


def _is_module(fn: FunctionType, instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_GLOBAL" and isinstance(fn.__globals__.get(instruction.argval), ModuleType)


class _Recorder:
    """Stands in for a tensor in a call that is known to be its only use."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None

    def to(self, *args: Any, **kwargs: Any) -> _Recorder:
        if not kwargs.pop("copy", False):
            device, dtype, non_blocking, memory_format = internals.parse_to(*args, **kwargs)
            # Tensor.to applies a memory format to every tensor, Module.to to those of 4 or 5 dimensions.
            if memory_format in (None, torch.preserve_format):
                self.transfer = Transfer(device, dtype, "all", non_blocking=non_blocking)
        return self

    def cpu(self) -> _Recorder:
        self.transfer = Transfer(torch.device("cpu"))
        return self

    def cuda(self, device: int | torch.device | None = None, non_blocking: bool = False) -> _Recorder:
        self.transfer = Transfer(_device("cuda", device), non_blocking=non_blocking)
        return self

    def _cast(self, dtype: torch.dtype) -> _Recorder:
        self.transfer = Transfer(None, dtype, "all")
        return self

    def half(self) -> _Recorder:
        return self._cast(torch.float16)

    def float(self) -> _Recorder:
        return self._cast(torch.float32)

    def double(self) -> _Recorder:
        return self._cast(torch.float64)

    def bfloat16(self) -> _Recorder:
        return self._cast(torch.bfloat16)
