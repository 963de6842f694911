"""What cannot be replicated as it is: refused with the tensor's name and the cure, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from devconv import registry
from devconv import torch_internals as internals
from devconv.errors import Refusal, ReplicationRefused

__all__ = ["refuse_bound_code", "refuse_dtypes", "refuse_half_moved", "refuse_source", "refuse_values"]

Named = Iterator[tuple[str, Tensor]]


def refuse_bound_code(modules: Sequence[nn.Module], names: Iterable[str]) -> None:
    """Compiled and scripted modules: their code would run on the original's tensors."""
    reasons = []
    for module, name in zip(modules, names, strict=True):
        if internals.is_scripted(module):
            why, cure = "it lives in TorchScript, which has its own copies", "Replicate the module it was made from."
        elif internals.is_compiled(module):
            why = "its compiled code is bound to the original, and replicas would run it on the original's tensors"
            cure = "Replicate the module that was compiled."
        else:
            continue
        reasons.append(Refusal(name, type(module).__name__, why, cure))
    if reasons:
        raise ReplicationRefused(reasons)


def refuse_half_moved(named: Named) -> None:
    """A module whose tensors are on several devices."""
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in named:
        by_device.setdefault(tensor.device, []).append(name)
    most = max(by_device, key=lambda device: len(by_device[device]))
    reasons = []
    for device, names in by_device.items():
        if device == most:
            continue
        cure = f'Move the whole module: model.to("{most}").'
        unregistered = next((name for name in names if "[" in name), None)
        if unregistered is not None:
            cure = f"{unregistered} is in a plain list or dict, where model.to() does not see it: use nn.ModuleList."
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        why = f"it{more} is on {device}, {len(by_device[most])} other tensors of the module are on {most}"
        reasons.append(Refusal(names[0], str(device), why, cure))
    raise ReplicationRefused(reasons)


def refuse_source(named: Named, source: torch.device | None, home: torch.device | None) -> None:
    """A module that is on `source`, not on `home` where its caller needs it."""
    if home is None or source is None or source == home:
        return
    why = f"the module is on {source}, the first of the devices is {home}"
    cure = f'Move the module with .to("{home}"), or name {source} first in devices.'
    raise ReplicationRefused([Refusal(next(named)[0], str(source), why, cure)])


def refuse_values(named: Named, source: torch.device | None, targets: Mapping[str, torch.device]) -> None:
    """A module on a device without values, such as ``meta``, for any other type of device."""
    if source is None or registry.backend_for(source.type).capabilities.values or targets.keys() <= {source.type}:
        return
    cure = f'Give it storage with model.to_empty(device="{next(iter(targets.values()))}") and load its weights.'
    raise ReplicationRefused([Refusal(next(named)[0], str(source), f"it has no values on {source}", cure)])


def refuse_dtypes(tensors: Sequence[Tensor], named: Named, targets: Mapping[str, torch.device]) -> None:
    """Tensors of a dtype that one of the devices cannot hold, and would leave behind or store as another."""
    limits = {
        device: registry.backend_for(device_type).capabilities.unsupported_dtypes
        for device_type, device in targets.items()
    }
    if not any(limits.values()) or not set().union(*limits.values()) & {tensor.dtype for tensor in tensors}:
        return
    reasons = []
    seen: set[tuple[torch.device, torch.dtype]] = set()
    for name, tensor in named:
        for device, unsupported in limits.items():
            if tensor.dtype in unsupported and (device, tensor.dtype) not in seen:
                seen.add((device, tensor.dtype))
                why = f"it is {tensor.dtype}, which {device} cannot hold"
                reasons.append(Refusal(name, str(tensor.device), why, "Convert it to another dtype."))
    raise ReplicationRefused(reasons)
