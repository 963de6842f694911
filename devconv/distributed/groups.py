"""Which process group reduces a module's gradients, and on which side: on the device, or through the host."""

from __future__ import annotations

import torch.distributed as dist

from devconv.errors import ProcessGroupError
from devconv.registry import backend_for

__all__ = ["check_group", "reduces_on_device", "size_of"]

Group = dist.ProcessGroup | None
"""A process group; None is the default one."""


def check_group(group: Group) -> None:
    """Refuse a process that has no process group, or is no member of the given one.

    Raises:
        ProcessGroupError: with the call that makes one.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ProcessGroupError(
            "",
            "torch.distributed is not initialised",
            "Start the program with `torchrun --nproc-per-node=N program.py` and call "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), or "gloo", before replicate().',
        )
    if dist.get_rank(group) < 0:
        raise ProcessGroupError(
            "",
            "this process is no member of process_group",
            "Call replicate() on the members only, or pass the group that this process is in.",
        )


def size_of(group: Group) -> tuple[int, int]:
    """This process's rank in the group, and the number of its ranks."""
    return dist.get_rank(group), dist.get_world_size(group)


def reduces_on_device(device_type: str, group: Group) -> bool:
    """Whether the group reduces tensors of a device type where they are; False: they have to go through the host.

    The device's backend says whether any process group reduces its tensors at all: torch does not refuse one that
    cannot (gloo's ``all_reduce`` of a tensor on a device that it does not know can return without having done anything).

    Raises:
        ProcessGroupError: the group serves neither the device, nor the host in place of a device that has no
            process group of its own.
    """
    served = served_by(group)
    wanted = backend_for(device_type).capabilities.process_group
    if wanted is not None:
        if device_type in served:
            return True
        raise ProcessGroupError(
            device_type,
            f"the group serves {_listed(served)}",
            f'Pass process_group=torch.distributed.new_group(backend="{wanted}"), or initialise with "{wanted}".',
        )
    if "cpu" in served:
        return False
    raise ProcessGroupError(
        device_type,
        f"no process group reduces {device_type} tensors, and the host, which could do it for them, is not served "
        f"either: the group serves {_listed(served)}",
        'Pass process_group=torch.distributed.new_group(backend="gloo"), or replicate over a mesh if the device has '
        "one (docs/replication.md).",
    )


def served_by(group: Group) -> dict[str, str]:
    """Device type -> backend that the group reduces it with.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> served_by(None)["cpu"]
    'gloo'
    >>> dist.destroy_process_group()
    """
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(",") if part)
    return {device_type: name for device_type, _, name in pairs if name}


def _listed(served: dict[str, str]) -> str:
    return ", ".join(f"{device_type} by {name}" for device_type, name in served.items()) or "nothing"
