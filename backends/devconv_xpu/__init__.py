"""Intel GPUs, through ``torch.xpu``. Written from torch's documentation; not run on Intel hardware yet."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from devconv import Backend, Capabilities, UnavailableDeviceError

__all__ = ["XpuBackend"]


class XpuBackend(Backend):
    """Backend for ``xpu``. torch's caching allocator keeps a source alive until a queued copy has read it."""

    device_type = "xpu"
    api_version = 1
    capabilities = Capabilities(process_group="xccl")

    def load(self) -> None:
        if not torch.xpu.is_available():
            raise UnavailableDeviceError(
                "xpu",
                f"torch.xpu.is_available() is False (torch {torch.__version__})",
                "Install an XPU build of torch and Intel's GPU driver.",
            )
        kinds = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
        if not all(kind.has_fp64 for kind in kinds):
            # Some of Intel's GPUs have no 64-bit floats; a mixed machine is held to the least of them.
            self.capabilities = Capabilities(
                unsupported_dtypes=frozenset({torch.float64, torch.complex128}), process_group="xccl"
            )

    def device_count(self) -> int:
        return torch.xpu.device_count()

    def current_index(self) -> int | None:
        return torch.xpu.current_device()

    def scope(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.xpu.device(device)

    def synchronize(self, device: torch.device | None = None) -> None:
        for index in range(self.device_count()) if device is None else [device.index]:
            torch.xpu.synchronize(index)

    def free_memory(self, device: torch.device) -> int | None:
        free, _ = torch.xpu.mem_get_info(device)
        reusable = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
        return int(free) + int(reusable)
