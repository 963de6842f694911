"""`replicate`: one module, in place, as one of many copies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from devconv import torch_internals as internals
from devconv.errors import (
    AlreadyReplicatedError,
    NotAModuleError,
    NotReplicatedError,
    PendingBackwardError,
    Refusal,
    ReplicationRefused,
)

from .agreement import agree
from .bucketed import BucketedReducer
from .collecting import MARK, Managed, Signature, collect, manager_of, signature_of, warn_of_early_hooks
from .contract import unchanged
from .groups import Group, check_group, reduces_on_device
from .hosted import HostReducer
from .meshes import Mesh, MeshRole
from .reducing import Flight, Options, Reducer

__all__ = ["let_go", "no_sync", "release", "replicate"]

M = TypeVar("M", bound=nn.Module)


def replicate(
    module: M,
    *,
    process_group: Group = None,
    mesh: Mesh | None = None,
    ignored_modules: Iterable[nn.Module] = (),
    broadcast_buffers: bool = True,
    find_unused_parameters: bool = False,
    bucket_cap_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
) -> M:
    """Train `module` as one of many copies, in place.

    The module stays the object that it is: its class, the names of its tensors and the keys of its ``state_dict`` do
    not change. Nothing happens before its first forward pass, so this can be called before the module is moved,
    before the optimizer is made, and on a lazy module. That first pass has to be run by every rank: it materialises
    what is lazy, compares the ranks' modules, and broadcasts parameters and buffers from rank 0. From then on every
    backward pass leaves the average of all ranks' gradients in ``.grad``.

    A module that is moved, cast, frozen or extended later gets a new reducer at its next forward pass, on every rank.

    Args:
        module: what is replicated; call it, not one of its children.
        process_group: the ranks to average over, None for the default group. Gradients are averaged where they are
            if the device's backend names a process group and this one serves the device (nccl for CUDA, gloo for the
            CPU); on other devices (XLA) they pass through the host, which the group then has to serve.
        mesh: in place of a process group, the mesh of a backend (``devconv_xla.spmd``): one process drives all
            devices, inputs are split along their first dimension. The arguments below are not for meshes.
        ignored_modules: sub-modules that are left alone with everything below them. Those that FSDP,
            DistributedDataParallel or another `replicate` manages are left alone without being named.
        broadcast_buffers: give every rank rank 0's buffers at the beginning of a forward pass too.
        find_unused_parameters: average also where a backward pass reaches only a part of the parameters, at the price
            of a search through each graph. Always so where gradients pass through the host.
        bucket_cap_mb: size of what is averaged in one call, in MiB; None is torch's default of 25.
        gradient_as_bucket_view: let ``.grad`` be a view of what is averaged, which saves one copy of all gradients.

    Returns:
        `module` itself.

    Raises:
        NotAModuleError: `module` is none.
        AlreadyReplicatedError: it is replicated already.
        ProcessGroupError: torch.distributed is not initialised, or this process is no member of the group.
        ReplicationRefused: another API manages `module`, or an ignored module is not part of it. From the first
            forward pass: tensors without values or on several device types, each with its full name.
        RankLostError, RanksDisagreeError: from the first forward pass, if the ranks are not all there or not alike.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layer = nn.Linear(3, 1)
    >>> replicate(layer) is layer, list(layer.state_dict())
    (True, ['weight', 'bias'])
    >>> layer(torch.ones(2, 3)).sum().backward()
    >>> layer.weight.grad
    tensor([[2., 2., 2.]])
    >>> dist.destroy_process_group()

    Source: torch.nn.parallel.DistributedDataParallel, torch.distributed._composable.replicate (torch 2.9 and 2.13).
    """
    if not isinstance(module, nn.Module):
        raise NotAModuleError(module)
    options = Options(broadcast_buffers, find_unused_parameters, bucket_cap_mb, gradient_as_bucket_view)
    attachment = module.__dict__.get(MARK)
    if attachment is not None and attachment.active:
        raise AlreadyReplicatedError(module)
    _refuse_managed(module)
    ignored = _checked(module, ignored_modules)
    role: Role
    if mesh is None:
        check_group(process_group)
        role = GroupRole(process_group, ignored, options)
    else:
        _check_mesh(mesh, process_group, options)
        role = MeshRole(mesh, ignored)
    with unchanged(module):
        if attachment is None:
            attachment = Attachment(module)
        attachment.role = role
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Forward passes in this block stay on their rank: gradients add up there, and no buffers are broadcast.

    The first backward pass of a forward pass after the block averages what has added up. Without gradients
    (``torch.no_grad()``) the block holds no collective at all, so that one rank can evaluate on its own. On a mesh it
    changes nothing.

    Args:
        module: a replicated module.

    Raises:
        NotReplicatedError: `module` is none.
    """
    role = _role_of(module, "no_sync()")
    role.quiet += 1
    try:
        yield
    finally:
        role.quiet -= 1


def release(module: nn.Module) -> None:
    """Let go of every parameter of a replicated module; the reducer is built anew at its next forward pass.

    A reducer holds on to the tensors that it was built for. Call this on every rank before something that has to
    exchange or to own them, such as a conversion to another device.

    Args:
        module: a replicated module.

    Raises:
        NotReplicatedError: `module` is none.
        PendingBackwardError: a forward pass still waits for its backward.
    """
    _role_of(module, "release()").release(module)


class Role(Protocol):
    """What a replicated module does around its forward pass."""

    quiet: int

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pass of `module` is about to run."""

    def after(self, output: Any) -> Any:
        """It has run; what it returns."""

    def release(self, module: nn.Module) -> None:
        """Let go of the module's tensors."""


class Attachment:
    """What hangs on a replicated module: two hooks and one entry in its ``__dict__``.

    A copy of the module, or a pickled one, carries no role: it is an ordinary module, and can be replicated itself.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.role: Role | None = None
        if module is not None:
            # First, so that it sees the inputs that the caller passed, as a call of the module would.
            module.register_forward_pre_hook(_Before(self), prepend=True, with_kwargs=True)
            module.register_forward_hook(_After(self))
            module.__dict__[MARK] = self

    @property
    def active(self) -> bool:
        """Whether the module is replicated."""
        return self.role is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return Attachment, ()


class _Before:
    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    @internals.without_compiler
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.attachment.role is not None:
            self.attachment.role.before(module, args, kwargs)


class _After:
    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    @internals.without_compiler
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self.attachment.role is None else self.attachment.role.after(output)


_built: weakref.WeakSet[GroupRole] = weakref.WeakSet()


class GroupRole:
    """A module that is replicated over a process group."""

    def __init__(self, group: Group, ignored: Sequence[nn.Module], options: Options) -> None:
        self._group, self._ignored, self._options = group, tuple(ignored), options
        self._reducer: Reducer | None = None
        self._managed = Managed()
        self._signature: Signature | None = None
        self._flight = Flight()
        self._building = self._inside = False
        self.quiet = 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Build the reducer where there is none that fits, and tell it that a forward pass begins."""
        self._inside = False
        if self._building or (self.quiet and not torch.is_grad_enabled()):
            return
        if self._reducer is None or signature_of(module, self._managed.skipped) != self._signature:
            self._build(module, args, kwargs)
        assert self._reducer is not None
        if self.quiet:
            self._reducer.hold()
        else:
            self._reducer.before()
            self._inside = True

    def after(self, output: Any) -> Any:
        """Tell the reducer that the forward pass that it was told of has ended."""
        if not self._inside or self._reducer is None:
            return output
        self._inside = False
        return self._reducer.after(output)

    def release(self, module: nn.Module) -> None:
        """Take the reducer down."""
        if self._flight.in_air:
            raise PendingBackwardError(module)
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        _built.discard(self)

    def holds(self, tensors: set[int]) -> bool:
        """Whether the reducer was built for one of the tensors, given by their ids."""
        return any(id(parameter) in tensors for parameter in self._managed.parameters.values())

    def _build(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.release(module)
        self._materialize(module, args, kwargs)
        managed = collect(module, self._ignored)
        device = managed.check(module)
        warn_of_early_hooks(managed)
        kind = BucketedReducer if reduces_on_device(device.type, self._group) else HostReducer
        agree(managed, f"{kind.__name__}, {self._options}", self._group)
        with unchanged(module):
            self._reducer = kind(module, managed, self._group, self._options, self._flight)
        self._managed = managed
        self._signature = signature_of(module, managed.skipped)
        _built.add(self)

    def _materialize(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give lazy tensors their shapes before the forward pass does: a reducer is built from shapes."""
        if not any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            return
        from devconv.lazy.materialization import materialize

        self._building = True
        try:
            materialize(module, *args, fallback="forward", **kwargs)
        finally:
            self._building = False


def let_go(module: nn.Module) -> None:
    """Release every reducer that was built for a parameter of `module`, whichever module it belongs to.

    For what is about to convert `module`.

    Raises:
        PendingBackwardError: a forward pass through one of them still waits for its backward.
    """
    if not _built:
        return
    tensors = {id(parameter) for parameter in module.parameters()}
    for role in [role for role in _built if role.holds(tensors)]:
        role.release(module)


def _role_of(module: nn.Module, action: str) -> Role:
    attachment = module.__dict__.get(MARK) if isinstance(module, nn.Module) else None
    if attachment is None or attachment.role is None:
        raise NotReplicatedError(module, action)
    role: Role = attachment.role
    return role


def _refuse_managed(module: nn.Module) -> None:
    manager = manager_of(module)
    if manager is not None:
        raise ReplicationRefused(
            [
                Refusal(
                    "",
                    type(module).__name__,
                    f"{manager} manages its parameters already, and two would average every gradient twice",
                    "Replicate a module that contains it, or use one of the two.",
                )
            ]
        )


def _checked(module: nn.Module, ignored_modules: Iterable[nn.Module]) -> list[nn.Module]:
    ignored = [*ignored_modules]
    inside = set(map(id, module.modules()))
    reasons = [
        Refusal(
            "",
            type(child).__qualname__,
            "it was passed in ignored_modules and is not a sub-module of the module",
            "Pass sub-modules of the replicated module, such as module.encoder.",
        )
        for child in ignored
        if id(child) not in inside or child is module
    ]
    if reasons:
        raise ReplicationRefused(reasons)
    return ignored


def _check_mesh(mesh: Mesh, process_group: Group, options: Options) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh= takes the mesh of a device's backend (devconv.distributed.Mesh), got {type(mesh).__qualname__}. For "
            f"torch's DeviceMesh pass process_group=device_mesh.get_group()."
        )
    if process_group is not None or options != Options():
        raise TypeError("mesh= replaces process_group= and the options of its reducer: leave those out.")
