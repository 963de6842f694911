"""Every private name of torch that devconv touches, and nothing else.

Each function says why the public API is not enough. All were tried on torch 2.9.1, 2.13.0 and 2.14.1;
``tests/test_torch_internals.py`` has one test for each, which is the first to fail when torch changes it.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

swap_impl: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
"""Exchange the TensorImpls of two tensor objects: data, requires_grad, grad, version counter and C++ hooks; class,
attributes, slots and weak references stay with the objects.

Reason: ``torch.utils.swap_tensors`` also exchanges what should stay, and refuses weak references and live graphs."""

use_count: Callable[[Tensor], int] = torch.Tensor._use_count
"""C++ references to a tensor's TensorImpl; 1 for a tensor that only Python holds.

Reason: the only way to see that an autograd graph, a view or a reducer holds a parameter."""

parse_to: Callable[..., tuple[torch.device | None, torch.dtype | None, bool, torch.memory_format | None]] = (
    torch._C._nn._parse_to
)
"""The arguments of ``.to`` as ``(device, dtype, non_blocking, memory_format)``.

Reason: torch's own parser is the definition of every form that ``.to`` accepts."""

stock_apply: Callable[..., nn.Module] = nn.Module._apply
"""Stock torch's conversion, as it was when devconv was first used.

Reason: the one function through which every conversion of a module passes."""

APPLY = "_apply"


def impl_of(tensor: Tensor) -> int:
    """Address of a tensor's TensorImpl. Reason: tells whether a swap has happened, so that an undo can be repeated."""
    return int(tensor._cdata)


def storage_of(tensor: Tensor) -> int:
    """Address of a tensor's StorageImpl. Reason: equal for aliases on every device, where ``data_ptr()`` is 0 on XLA
    and meta."""
    return cast(int, tensor.untyped_storage()._cdata)


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of. Reason: finds views that Python code holds on to."""
    return cast("Tensor | None", torch.Tensor._base.__get__(tensor))  # type: ignore[attr-defined]


def parameters_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own parameter slots. Reason: ``named_parameters`` hides ties and None, and cannot be written."""
    return cast("dict[str, Tensor | None]", module._parameters)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffer slots. Reason: as `parameters_of`."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own children. Reason: ``named_children`` is a generator that hides repeats; a walk over thousands
    of modules has a budget of microseconds for each."""
    return module._modules


def pre_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The module's forward pre-hooks. Reason: weight_norm, spectral_norm and pruning keep their state in one."""
    return cast("dict[int, Callable[..., Any]]", module._forward_pre_hooks)


def overrides_apply(module: nn.Module) -> bool:
    """Whether a module brings its own ``_apply`` (RNNs, torchmetrics). Reason: those must be entered through it."""
    return type(module)._apply is not nn.Module._apply or APPLY in module.__dict__


def backward_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]] | None:
    """What ``register_hook`` filled. Reason: the dict stays with the Python object when TensorImpls are swapped, while
    the C++ side keeps reading it from the old one."""
    return cast("dict[int, Callable[..., Any]] | None", tensor._backward_hooks)


def set_backward_hooks(tensor: Tensor, hooks: dict[int, Callable[..., Any]] | None) -> None:
    """Make `hooks` the dict that autograd reads for `tensor`. None first: setting the same dict twice adds it once."""
    tensor._backward_hooks = None
    if hooks is not None:
        tensor._backward_hooks = hooks  # type: ignore[assignment]


def accumulate_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]] | None:
    """What ``register_post_accumulate_grad_hook`` filled. Reason: as `backward_hooks`."""
    return cast("dict[int, Callable[..., Any]] | None", tensor._post_accumulate_grad_hooks)


def set_accumulate_hooks(tensor: Tensor, hooks: dict[int, Callable[..., Any]] | None) -> None:
    """Make `hooks` the dict that autograd reads for `tensor` after accumulating its gradient."""
    tensor._post_accumulate_grad_hooks = None  # type: ignore[attr-defined]
    if hooks is not None:
        tensor._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


def has_accumulator(tensor: Tensor) -> bool:
    """Whether a live autograd graph holds the node that accumulates `tensor`'s gradient.

    Reason: asking for the gradient edge makes the node where there is none, and the use count tells which it was.
    """
    before = use_count(tensor)
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    after = use_count(tensor)
    del edge
    return after == before


def is_wrapper(cls: type) -> bool:
    """Whether a tensor class keeps its data in inner tensors. Reason: `is_traceable_wrapper_subclass` is private, asks
    an instance, and misses subclasses that dispatch without being traceable."""
    return (
        hasattr(cls, "__tensor_flatten__")
        or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    )


_INERT_FUNCTIONS = (torch._C._disabled_torch_function_impl, torch.Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]
_CONVERSIONS = ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type", "detach")


def converts_itself(cls: type) -> bool:
    """Whether a tensor class has its own idea of what a conversion is, so that torch's must not be assumed.

    Reason: quantised parameters override ``to``; other classes answer every call in ``__torch_function__``. What an
    untouched class has there is private.
    """
    function = getattr(cls, "__torch_function__", None)
    return getattr(function, "__func__", function) not in _INERT_FUNCTIONS or any(
        getattr(cls, name) is not getattr(torch.Tensor, name) for name in _CONVERSIONS
    )


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` is a FakeTensor. Reason: stock torch treats them in its own way, by a private class."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def slot_names(cls: type) -> list[str]:
    """The ``__slots__`` of a class and its bases, as pickling sees them."""
    return list(copyreg._slotnames(cls))  # type: ignore[attr-defined]


def is_lazy_class(cls: type) -> bool:
    """Whether a class is an uninitialised parameter or buffer. Reason: ``is_lazy`` asks an instance."""
    return issubclass(cls, UninitializedTensorMixin)


def door_codes() -> dict[CodeType, str]:
    """Code object of every function that stock torch's front doors hand to ``_apply`` -> the door's name.

    Reason: identity of the code object recognises a pure transfer exactly, without calling anything.
    """
    doors = ("to", "cuda", "cpu", "xpu", "ipu", "mtia", "type", "float", "double", "half", "bfloat16", "to_empty")
    codes: dict[CodeType, str] = {}
    for door in doors:
        function = getattr(nn.Module, door, None)
        for constant in getattr(getattr(function, "__code__", None), "co_consts", ()):
            if isinstance(constant, CodeType) and constant.co_argcount == 1:
                codes[constant] = door
    return codes


def optimizer_policy(
    parameter: Tensor, value: Tensor, index: int, groups: list[dict[str, Any]], key: str
) -> torch.device | None:
    """Where torch itself puts the state entry `key` of `parameter` when it loads a checkpoint; None: leave it.

    Reason: the rule (``step`` stays on the host unless the group is capturable or fused) is a private method.
    """
    from torch.optim import Optimizer

    moved = Optimizer._process_value_according_to_param_policy(parameter, value, index, groups, key)
    return None if moved is value and value.device != parameter.device else moved.device


def fused_device_types() -> list[str]:
    """Device types with fused optimizer kernels. Reason: no public list; a fused step elsewhere is an assertion."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return _get_fused_kernels_supported_devices()


def is_fully_sharded(cls: type) -> bool:
    """Whether a module class was made by FSDP2. Reason: its ``_apply`` is right in stock torch; the import is heavy."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(cls, getattr(fsdp, "FSDPModule", ()))


def data_parallel_class() -> type | None:
    """DistributedDataParallel, if anything in the process imported it."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    return getattr(module, "DistributedDataParallel", None)


def derivations_of(module: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Attributes that a forward pre-hook derives from parameters, each with a function that derives it afresh.

    Reason: old weight_norm, spectral_norm and pruning keep such a tensor in the module's ``__dict__``, with a graph
    that pins the parameters, in three private layouts.
    """
    for hook in list(pre_hooks_of(module).values()):
        cls = type(hook)
        home = cls.__module__
        if home == "torch.nn.utils.weight_norm" and cls.__name__ == "WeightNorm":
            yield hook.name, lambda hook=hook: hook.compute_weight(module)  # type: ignore[attr-defined, misc]
        elif home == "torch.nn.utils.spectral_norm" and cls.__name__ == "SpectralNorm":
            yield hook.name, lambda hook=hook: hook.compute_weight(module, do_power_iteration=False)  # type: ignore[attr-defined, misc]
        elif home == "torch.nn.utils.prune" and hasattr(hook, "apply_mask"):
            yield hook._tensor_name, lambda hook=hook: hook.apply_mask(module)  # type: ignore[attr-defined, misc]
