"""The host itself: every other device is reached from here, so this backend's `copy` is a cast."""

from __future__ import annotations

import psutil
import torch

from devconv import Backend, Capabilities

__all__ = ["CpuBackend"]


class CpuBackend(Backend):
    """Backend for ``cpu``. ``cpu:0`` is accepted and means ``cpu``, as tensors report it."""

    device_type = "cpu"
    capabilities = Capabilities(host_memory=True, process_group="gloo")

    def current_index(self) -> int | None:
        return None

    def resolve(self, device: torch.device) -> torch.device:
        super().resolve(device)
        return torch.device("cpu")

    def free_memory(self, device: torch.device) -> int | None:
        return int(psutil.virtual_memory().available)
