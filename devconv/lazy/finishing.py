"""Initialising one lazy module from its first inputs, once, whole or not at all.

Torch's own procedure is called by its name; around it stand the cases that it loses: tensors that have a shape already
(from a checkpoint, or shared with a module that was first), unbatched inputs of instance norms, numbers that stay zero,
and subclasses that would turn into their base.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from devconv import torch_internals as internals
from devconv.contexts import run_with
from devconv.errors import LazyShapeError

from .naming import name_in
from .pending import lazy_tensors, make_lazy
from .sizes import channels_first_of_norm, knows_its_tensors, own_tensors, settle_sizes
from .undo import all_or_nothing

__all__ = ["LOADED", "LOCK", "finish", "finish_loaded", "in_progress", "stay_itself"]

LOCK = threading.RLock()
"""Held while lazy modules are initialised. One for the process: it is taken once in a module's life."""

LOADED = "devconv_loaded"
"""Attribute of a partly loaded lazy module: its tensors that came from a checkpoint, and whether each was lazy."""

_in_progress: ContextVar[frozenset[int]] = ContextVar("devconv_lazy_in_progress", default=frozenset())


def in_progress(module: nn.Module) -> bool:
    """Whether `finish` is running for `module` in this context."""
    return id(module) in _in_progress.get()


def finish(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Initialise a lazy module from its first inputs.

    Args:
        module: a pending lazy module.
        args: positional inputs; only shapes are read by torch's own classes, so meta tensors do.
        kwargs: inputs by name.

    Raises:
        LazyShapeError: a tensor that it has already does not fit the inputs.
        Exception: whatever its `initialize_parameters` raises; the module is as lazy as before.
    """
    known = knows_its_tensors(module)
    batched = (_batched(module, args[0]), *args[1:]) if args else args

    def steps() -> None:
        with all_or_nothing([module]), _set_aside(module, known=known):
            stay_itself(module)
            _infer(module, batched, kwargs, known=known)

    run_with(_in_progress, _in_progress.get() | {id(module)}, steps)


def finish_loaded(module: nn.Module) -> bool:
    """Finish a lazy module whose tensors all came from a checkpoint: its numbers, hooks and class.

    Returns:
        False, with nothing done, if something is lazy still or the module's numbers cannot be told from its tensors.
    """
    if not knows_its_tensors(module) or not own_tensors(module) or any(lazy_tensors(module)):
        return False

    def steps() -> bool:
        with all_or_nothing([module]):
            stay_itself(module)
            if not settle_sizes(module):
                return False
            module.__dict__.pop(LOADED, None)
            # Torch's own procedure removes the hooks and changes the class; there is nothing left to initialise.
            module.__dict__["initialize_parameters"] = lambda: None
            internals.infer_parameters(module, (), {})
            del module.__dict__["initialize_parameters"]
        return True

    return run_with(_in_progress, _in_progress.get() | {id(module)}, steps)


def _infer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, known: bool) -> None:
    if not known:
        internals.infer_parameters(module, args, kwargs)
        return
    # The class changes at the end of torch's procedure, and the numbers are looked up by the lazy class.
    lazy_class = type(module)
    internals.infer_parameters(module, args, kwargs)
    final_class, module.__class__ = type(module), lazy_class
    try:
        settle_sizes(module)
        shape = getattr(args[0], "shape", None) if args else None
        features = None if shape is None else channels_first_of_norm(module, shape)
        if features is not None:
            # Without affine parameters and statistics torch's lazy norms keep num_features at 0.
            module.num_features = features  # type: ignore[assignment]
    finally:
        module.__class__ = final_class


_UNBATCHED = {nn.LazyInstanceNorm1d: 2, nn.LazyInstanceNorm2d: 3, nn.LazyInstanceNorm3d: 4}


def _batched(module: nn.Module, value: Any) -> Any:
    """Torch's lazy instance norms read ``shape[1]`` even of an unbatched input, where the channels come first."""
    for cls, dims in _UNBATCHED.items():
        if isinstance(module, cls) and isinstance(value, Tensor) and value.dim() == dims:
            return value.unsqueeze(0)
    return value


def stay_itself(module: nn.Module) -> None:
    """Let a subclass that does not say what it becomes stay what it is: turned into its base it would lose its methods.

    Torch looks the class up on the instance, and so does its compiler, before the module is initialised.
    """
    cls = type(module)
    if getattr(cls, "cls_to_become", None) is not None and "cls_to_become" not in vars(cls):
        module.__dict__["cls_to_become"] = None


@contextmanager
def _set_aside(module: nn.Module, *, known: bool) -> Iterator[None]:
    """Keep the tensors that have values already out of the initialisation, and put them back when it has run.

    Without this a module with a loaded weight and a lazy bias can't be used at all: its own code wants to give every
    tensor a shape. The stand-ins are on meta, so that nothing is allocated or drawn for them.
    """
    held = own_tensors(module)
    lazy = {key for key, tensor in held.items() if is_lazy(tensor)}
    loaded: Mapping[str, bool] = module.__dict__.pop(LOADED, {})
    if known:
        # BatchNorm's counter is made by the constructor; the rest by the first input.
        loaded = {key: key != "num_batches_tracked" for key in held if key not in lazy}
    aside = {key: held[key] for key in loaded if key in held and key not in lazy} if lazy else {}
    for key, tensor in aside.items():
        _table_of(module, key)[key] = _stand_in(tensor, lazy=loaded[key])
    yield
    for key, tensor in aside.items():
        table = _table_of(module, key)
        needed = table[key]
        if needed is not None and not is_lazy(needed) and needed.shape != tensor.shape:
            raise LazyShapeError(name_in(module, key), tensor.shape, needed.shape)
        table[key] = tensor


def _stand_in(tensor: Tensor, *, lazy: bool) -> Tensor:
    if not lazy:
        # Not empty_like: on meta it imports sympy.
        twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    cls = UninitializedParameter if isinstance(tensor, nn.Parameter) else UninitializedBuffer
    return make_lazy(cls, tensor.requires_grad, "meta", tensor.dtype)


def _table_of(module: nn.Module, key: str) -> dict[str, Tensor | None]:
    table = internals.parameters_of(module)
    return table if key in table else internals.buffers_of(module)
