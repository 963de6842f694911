"""`replicate`: one module, in place, as one of many copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from devconv.errors import AlreadyReplicatedError, NotAModuleError, NotReplicatedError, Refusal, ReplicationRefused

from .attachment import Attachment, Role
from .collecting import MARK, manager_of
from .contract import unchanged
from .groups import Group, check_group
from .membership import GroupRole
from .meshes import Mesh, MeshRole
from .reducing import Options

__all__ = ["no_sync", "release", "replicate"]

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
        mesh: in place of a process group, the mesh of a backend (XLA has one): one process drives all
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

    >>> import torch, torch.distributed as dist
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
