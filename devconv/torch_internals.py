"""Every private name of torch that devconv touches, and nothing else.

Each function says why the public API is not enough. All were tried on torch 2.9.1, 2.13.0 and 2.14.1;
``tests/test_torch_internals.py`` has one test for each, which is the first to fail when torch changes it.
"""

from __future__ import annotations

import copyreg
import functools
import gc
import inspect
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

swap_impl: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
"""Exchange the TensorImpls of two tensor objects: data, requires_grad, grad, version counter and C++ hooks; class,
attributes, slots and weak references stay with the objects.

Reason: ``torch.utils.swap_tensors`` also exchanges what should stay, and refuses weak references and live graphs."""

use_count: Callable[[Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
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
    """Address of a tensor's StorageImpl. Reason: equal for aliases on every device, where ``data_ptr()`` is 0 on XLA and
    meta.

    Raises:
        NotImplementedError: it has no storage (sparse layouts).
    """
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


tables_and_hooks: Callable[
    [dict[str, Any]],
    tuple[
        dict[str, Tensor | None], dict[str, Tensor | None], dict[str, nn.Module | None], dict[int, Callable[..., Any]]
    ],
] = operator.itemgetter("_parameters", "_buffers", "_modules", "_forward_pre_hooks")
"""A module's slots for parameters, buffers and children, and its forward pre-hooks, from its ``__dict__``.

Reason: as the four functions below; a walk over thousands of modules has a budget of microseconds for each, and going
by attribute would take more than that."""


tables_by_attribute: Callable[[nn.Module], tuple[Any, Any, Any, Any]] = attrgetter(
    "_parameters", "_buffers", "_modules", "_forward_pre_hooks"
)
"""As `tables_and_hooks`, for modules that keep them elsewhere. Reason: as there; scripted modules do."""


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
    return module._forward_pre_hooks


def class_overrides_apply(cls: type[nn.Module]) -> bool:
    """Whether a module class brings its own ``_apply`` (RNNs, torchmetrics). Reason: it must be entered through it."""
    return cls._apply is not nn.Module._apply


def backward_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]] | None:
    """What ``register_hook`` filled. Reason: the dict stays with the Python object when TensorImpls are swapped, while
    the C++ side keeps reading it from the old one."""
    return cast("dict[int, Callable[..., Any]] | None", tensor._backward_hooks)


def set_backward_hooks(tensor: Tensor, hooks: dict[int, Callable[..., Any]] | None) -> None:
    """Make `hooks` the dict that autograd reads for `tensor`. None first: setting the same dict twice adds it once."""
    tensor._backward_hooks = None
    if hooks is not None:
        tensor._backward_hooks = hooks


def accumulate_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]] | None:
    """What ``register_post_accumulate_grad_hook`` filled. Reason: as `backward_hooks`."""
    return cast("dict[int, Callable[..., Any]] | None", tensor._post_accumulate_grad_hooks)


def with_hooks(tensors: list[Tensor]) -> list[Tensor]:
    """Those that have hooks of either kind. Reason: as `backward_hooks`; a list at a time, since the look is on the
    path of every conversion."""
    either = zip(map(_backward_hooks, tensors), map(_accumulate_hooks, tensors), strict=True)
    return [
        tensor
        for tensor, (backward, accumulate) in zip(tensors, either, strict=True)
        if backward is not None or accumulate is not None
    ]


_backward_hooks = attrgetter("_backward_hooks")
_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")


def set_accumulate_hooks(tensor: Tensor, hooks: dict[int, Callable[..., Any]] | None) -> None:
    """Make `hooks` the dict that autograd reads for `tensor` after accumulating its gradient.

    Setting None clears Python's side alone: autograd would go on reading the dict from before, so it gets an empty one.
    """
    tensor._post_accumulate_grad_hooks = {} if hooks is None else hooks
    if hooks is None:
        tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]


_HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")


def chose_grad_dtype(tensor: Tensor) -> bool:
    """Whether a leaf's gradient was said to have another dtype than the leaf, or any.

    Reason: ``grad_dtype`` is new in torch 2.10, and raises for the result of a computation.
    """
    return _HAS_GRAD_DTYPE and tensor.is_leaf and tensor.grad_dtype is not tensor.dtype


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
        hasattr(cls, "__tensor_flatten__") or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    )


@functools.cache
def class_on(device: torch.device) -> type[Tensor]:
    """The Python class of `device`'s own tensors: torch's own, or one that the vendor's library keeps its data in.

    Reason: torchax's tensors are objects of a Python class with the data in their ``__dict__``; their TensorImpl is an
    empty shell on ``meta``. For a tensor that goes there, class and ``__dict__`` are part of what has to arrive.
    """
    made = torch.empty(0, device=device)
    _SPECIMENS.setdefault(type(made), made)
    return type(made)


def has_own_class(device: torch.device) -> bool:
    """Whether tensors on `device` are of a Python class of the vendor's, with their data in it."""
    if device.type in ("cpu", "meta") or fake_mode_is_active():
        return False
    cls = class_on(device)
    return cls is not Tensor and is_wrapper(cls)


def exchange_bodies(tensor: Tensor, other: Tensor) -> None:
    """Exchange what `swap_impl` leaves with the objects and a class of the vendor's needs: class, and what it keeps in
    its ``__dict__``. A parameter stays one. Calling it again undoes it.

    Reason: as `class_on`; torch marks a parameter of such a class by a private attribute.
    """
    parameter = isinstance(tensor, nn.Parameter)
    kept = [_IS_PARAMETER, *_body_of(type(tensor)), *_body_of(type(other))]
    mine, theirs = vars(tensor), vars(other)
    ours = {name: mine.pop(name) for name in kept if name in mine}
    brought = {name: theirs.pop(name) for name in kept if name in theirs}
    mine.update(brought)
    theirs.update(ours)
    cls, new = type(tensor), type(other)
    other.__class__ = cls
    tensor.__class__ = nn.Parameter if parameter and new is Tensor else new
    if parameter and is_wrapper(new):
        mine[_IS_PARAMETER] = True


_IS_PARAMETER = "_is_param"


@functools.cache
def _body_of(cls: type) -> tuple[str, ...]:
    """Names of the attributes that instances of a device's own class are made with."""
    return tuple(vars(_SPECIMENS[cls])) if cls in _SPECIMENS else ()


def without_body(tensor: Tensor) -> dict[str, Any]:
    """The attributes of a tensor that are not its class's own."""
    own = {_IS_PARAMETER, *_body_of(type(tensor))}
    return {name: value for name, value in vars(tensor).items() if name not in own}


_SPECIMENS: dict[type, Tensor] = {}


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


def fake_mode_is_active() -> bool:
    """Whether a FakeTensorMode turns the results of all operations into fakes. Reason: a backend's batched call would
    be handed fakes in place of the real tensors, and XLA's ends the process."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def slot_names(cls: type) -> list[str]:
    """The ``__slots__`` of a class and its bases, as pickling sees them."""
    return list(copyreg._slotnames(cls))  # type: ignore[attr-defined]


def is_lazy_class(cls: type) -> bool:
    """Whether a class is an uninitialised parameter or buffer. Reason: ``is_lazy`` asks an instance."""
    return issubclass(cls, UninitializedTensorMixin)


DOORS = (
    "to", "cuda", "cpu", "xpu", "ipu", "mtia", "type", "float", "double", "half", "bfloat16", "to_empty", "share_memory"
)  # fmt: skip
"""The front doors of ``nn.Module``: every one only hands a function to ``_apply``."""


def door_codes() -> dict[CodeType, str]:
    """Code object of every function that stock torch's front doors hand to ``_apply`` -> the door's name.

    Reason: identity of the code object recognises a pure transfer exactly, without calling anything.
    """
    codes: dict[CodeType, str] = {}
    for door in DOORS:
        function = getattr(nn.Module, door, None)
        for constant in getattr(getattr(function, "__code__", None), "co_consts", ()):
            if isinstance(constant, CodeType) and constant.co_argcount == 1:
                codes[constant] = door
    return codes


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


stock_to: Callable[..., nn.Module] = nn.Module.to
"""``nn.Module.to`` as stock torch has it. Public; kept beside `stock_apply` so that both are taken before any patch."""


# Lazy modules. Torch's compiler and other libraries rely on these names, so they are called and wrapped, never replaced.

INFER = "_infer_parameters"
LOAD = "_load_from_state_dict"
REPLICATE = "_replicate_for_data_parallel"
LAZY_MIXIN: type = UninitializedTensorMixin
"""What makes a tensor lazy. Reason: no public name."""


def pending_handle(module: nn.Module) -> Any | None:
    """The handle of a lazy module's own pre-hook; None once the module is initialised, and for any other module.

    Reason: torch's only sign that a lazy module still waits for its first input, whatever its tensors are.
    """
    return module.__dict__.get("_initialize_hook")


def infer_parameters(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Initialise a lazy module from its first inputs: its own `initialize_parameters`, its hooks, its class.

    Reason: what a lazy module's pre-hook does; also the name that torch's compiler calls.
    """
    module._infer_parameters(module, args, kwargs)  # type: ignore[operator]


def hook_tables(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Every dict that initialising a lazy module changes: tensors, children, hooks.

    Reason: to put a module back in place, since handles of hooks keep weak references to these very dicts.
    """
    return (
        module._parameters,
        module._buffers,
        module._modules,
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._load_state_dict_pre_hooks,
    )


def has_tables(module: nn.Module) -> bool:
    """Whether ``nn.Module.__init__`` has run. Reason: a look over every module that is alive meets unfinished ones."""
    return {"_parameters", "_buffers", "_modules"} <= module.__dict__.keys()


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside one that ``torch.compile`` made, any other module itself.

    Reason: shapes are followed without compiling anything. The wrapper's class is private, its import heavy.
    """
    frame = sys.modules.get("torch._dynamo.eval_frame")
    while frame is not None and isinstance(module, frame.OptimizedModule):
        module = module._orig_mod
    return module


def forget_compilation(module: nn.Module) -> None:
    """Undo ``module.compile()``, which leaves its work in a private slot."""
    module._compiled_call_impl = None


def reset_attention(module: nn.MultiheadAttention) -> None:
    """Draw the projections of a MultiheadAttention. Reason: the one torch module whose ``reset_parameters`` is private."""
    module._reset_parameters()


def restore_location(device: torch.device) -> torch.device:
    """Where ``torch.load(map_location=...)`` wants what was saved on `device`; `device` itself outside of a load.

    Reason: tensors without a storage in the file have to ask, as torch's own do.
    """
    if callable(torch.serialization._serialization_tls.map_location):
        # It wants a storage, and there is none.
        return device
    return torch.device(torch._utils._get_restore_location(str(device)))


def rebuild_with_attributes(make: type, arguments: tuple[Any, ...], state: dict[str, Any]) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns for a tensor made by ``make(*arguments)`` with attributes.

    Reason: torch's own function for it, so that a file can be read without devconv and under ``weights_only``.
    """
    return torch._tensor._rebuild_from_type_v2, (make, make, arguments, state)


def safe_globals_of_user() -> tuple[Any, str]:
    """Where ``weights_only`` loading looks up the classes that a program has allowed: a module and its function.

    Reason: ``add_safe_globals`` cannot be taken back for one class.
    """
    from torch import _weights_only_unpickler

    return _weights_only_unpickler, "_get_user_allowed_globals"


def functional_swap() -> tuple[Any, str]:
    """The function through which ``functional_call`` puts tensors into a module: a module and its name.

    Reason: ``functional_call`` itself is imported by name everywhere.
    """
    from torch.nn.utils import stateless

    return stateless, "_reparametrize_module"


def has_weak_references(tensor: Tensor) -> bool:
    """Whether Python code holds a weak reference to `tensor`."""
    return bool(weakref.getweakrefs(tensor))


def _with_subclasses(cls: type | None) -> set[type]:
    found: set[type] = set()
    waiting: list[type] = [] if cls is None else [cls]
    while waiting:
        found.add(current := waiting.pop())
        subclasses: list[type] = type.__subclasses__(current)
        waiting += [below for below in subclasses if below not in found]
    return found


def outside_holders(suspects: dict[int, Tensor], own: set[int]) -> tuple[dict[int, torch.Size], set[int]]:
    """Views of tensors, and reducers of parameters, that live outside a model.

    Args:
        suspects: tensors by their ids.
        own: ids of the tensors that belong to the model.

    Returns:
        The shape of one view held elsewhere, by the suspect's id; and the ids of the suspects that a
        DistributedDataParallel reduces.

    Reason: C++ counts references and does not name them; one pass over Python's objects finds those that Python holds.
    """
    views: list[Tensor] = []
    reduced: set[int] = set()
    reducers = _with_subclasses(data_parallel_class())
    wanted = _with_subclasses(Tensor) | reducers
    # By exact class, in a comprehension: a program has a million objects, and this is on the path of a move.
    for thing in [thing for thing in gc.get_objects() if type(thing) in wanted]:
        cls = type(thing)
        if cls in reducers:
            reduced.update(id(parameter) for parameter in thing.module.parameters() if id(parameter) in suspects)
        elif id(thing) not in own and id(thing) not in suspects and not is_lazy_class(cls):
            base = thing._base
            if base is not None and id(base) in suspects:
                views.append(thing)
    thing = base = None
    held = _held_by_python(views)
    return {id(view._base): view.shape for view in views if id(view) in held}, reduced


def _held_by_python(views: list[Tensor]) -> set[int]:
    """Ids of those of `views` that something in Python holds, and not only the saved tensors of a graph.

    Reason: a graph that saved ``weight.T`` keeps its Python object too, and counts as one reference. One more is a
    holder's for certain; if it is the only one, the holder has to be found: among what Python's collector knows, and
    among the variables of the functions that are running, which it does not.
    """
    # The list, the variable and the argument.
    held = {id(view) for view in views if sys.getrefcount(view) > 3 + 1}
    single = {id(view) for view in views} - held
    if not single:
        return held
    for holder in gc.get_referrers(*[view for view in views if id(view) in single]):
        if holder is not views:
            held.update(single.intersection(map(id, gc.get_referents(holder))))
    ours = {outside_holders.__code__, _held_by_python.__code__}
    mine = threading.get_ident()
    top: FrameType | None
    frame: FrameType | None
    for thread, top in sys._current_frames().items():
        frame = top
        while frame is not None:
            if frame.f_code not in ours:
                variables = frame.f_locals
                held.update(single.intersection(map(id, variables.values())))
                # Until Python 3.12 a function keeps the dict that was asked for, and with it what the function drops
                # later on. The frame, the variable and the argument: nobody else has it; a debugger would read it back.
                kept = type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
                if kept and thread == mine and sys.gettrace() is None and sys.getrefcount(variables) == 3:
                    variables.clear()
            frame = frame.f_back
    # The own frame among its own variables is a cycle, and would keep them.
    top = frame = None
    return held


def views_of(tensors: list[Tensor]) -> set[int]:
    """Ids of the tensors that one of `tensors` is a view of."""
    return {id(tensor._base) for tensor in tensors if tensor._base is not None}


def start_lazy_device() -> bool:
    """Make ``torch.device("lazy")`` usable; False where torch was built without it.

    Reason: the only foreign device that every torch for Linux has, and its start is private. It executes on the CPU.
    """
    if not hasattr(torch._C, "_lazy_ts_backend"):
        return False
    from torch._lazy import ts_backend

    ts_backend.init()
    return True


def synchronize_lazy_device(devices: list[str]) -> None:
    """Run what is queued on each of these lazy devices and wait for it. Reason: as `start_lazy_device`."""
    import torch._lazy

    for device in devices:
        torch._lazy.mark_step(device, wait=True)


def make_like(tensor: Tensor, data: Tensor) -> Tensor:
    """A new leaf of `tensor`'s class on `data`, made without the class's constructor.

    Reason: a Parameter subclass may want arguments that nobody can guess; its attributes are carried over instead.
    """
    return torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)


# Replication over a process group: the parts of DistributedDataParallel that its composable forms, torch's own too,
# have to call.

without_compiler: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined]
"""Decorator: ``torch.compile`` runs the function as it is. Reason: the public ``torch.compiler.disable`` imports the
compiler on the spot, this one on the first call under it."""


def before_forward(ddp: nn.Module) -> None:
    """What DistributedDataParallel does before it calls its module. Reason: public only together with that call."""
    ddp._pre_forward()  # type: ignore[operator]


def after_forward(ddp: nn.Module, output: Any) -> Any:
    """What DistributedDataParallel does with its module's output. Reason: as `before_forward`."""
    return ddp._post_forward(output)  # type: ignore[operator]


def leave_to_others(module: nn.Module, names: list[str]) -> None:
    """Parameters and buffers that DistributedDataParallel leaves alone. Reason: documented, with a private name."""
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward pass that is running. Reason: no public hook sees that moment."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass. Reason: no public sign of it."""
    return torch._C._current_graph_task_id() != -1


def composable_apis(module: nn.Module) -> list[str]:
    """Names of torch's composable APIs that manage `module`. Reason: the registry that those APIs keep is private."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    return [] if contract is None else list(contract._get_registry(module) or ())


def timeout_of(group: Any) -> timedelta | None:
    """How long a gloo group waits for a rank; None where torch does not say.

    Reason: no public getter, and ``monitored_barrier`` waits half an hour whatever the group was made with.
    """
    from torch.distributed import ProcessGroup, distributed_c10d

    group = distributed_c10d._get_default_group() if group is None else group
    if not isinstance(group, ProcessGroup):
        return None
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else None


# Replicas in one process: cached copies of a module's Python side, which tensors are put into on every call.

try:
    from torch._C._dynamo.guards import dict_version as _dict_version
except ImportError:  # pragma: no cover - then nothing is cached, and every call builds its replicas anew
    _dict_version = None  # type: ignore[assignment]

TABLES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what is registered with it, in the order of `tables_of`."""

PLAIN_MODULE = frozenset(nn.Module().__dict__)
"""Attributes that every module has: its tables, its hooks, its mode. None of them holds a user's plain attribute."""


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The dicts of `TABLES`. Reason: as `parameters_of`."""
    return module._parameters, module._buffers, module._modules


def dict_versions(tables: list[dict[str, Any]]) -> list[int] | None:
    """A number for each dict that is another one after any change of the dict; None where torch does not tell.

    Reason: Python has no public sign that a dict has changed, and comparing every attribute of thousands of modules
    costs more than everything else that replication does. torch's compiler reads the same number for its guards.
    """
    return None if _dict_version is None else list(map(_dict_version, tables))


def bare_replica(module: nn.Module) -> nn.Module:
    """A shallow copy of `module` without its parameters. Reason: the method that modules with lists of their own
    tensors (RNNs, graph modules) override for this purpose is private."""
    replica = module._replicate_for_data_parallel()
    assert isinstance(replica, nn.Module)
    return replica


def replicates_itself(module: nn.Module) -> bool:
    """Whether a module brings its own `REPLICATE`. Reason: then its copy is made by it on every call."""
    return REPLICATE in module.__dict__ or type(module)._replicate_for_data_parallel is not (
        nn.Module._replicate_for_data_parallel
    )


def mark_replica(attributes: dict[str, Any], parameters: dict[str, Any]) -> None:
    """The marks that torch's own replicas carry. Reason: ``zero_grad`` and other libraries look for them."""
    attributes["_is_replica"] = True
    attributes["_former_parameters"] = parameters


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``module.compile()`` bound code to this very module. Reason: both leave it in
    private places, and a shallow copy would run that code on the original's tensors."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def is_scripted(module: nn.Module) -> bool:
    """Whether a module lives in TorchScript. Reason: the public class is slow to import and loaded anyway if used."""
    script = sys.modules.get("torch.jit._script")
    return script is not None and isinstance(module, script.ScriptModule)


def writes_of(tensors: list[Tensor]) -> list[int]:
    """How often each tensor was written in place, as far as autograd knows. Reason: the version counter is private."""
    return [tensor._version for tensor in tensors]


_impl = attrgetter("_cdata")


def impls_of(tensors: list[Tensor]) -> list[int]:
    """`impl_of` for a list, without a Python loop. Reason: asked for every parameter before every forward pass."""
    return list(map(_impl, tensors))
