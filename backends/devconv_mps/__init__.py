"""Apple GPUs, through torch's ``mps`` device. Written from torch's documentation; not run on Apple hardware yet."""

from __future__ import annotations

import platform

import torch

from devconv import Backend, Capabilities, UnavailableDeviceError

__all__ = ["MpsBackend"]


class MpsBackend(Backend):
    """Backend for ``mps``. Metal has no 64-bit floats; device memory is the machine's memory."""

    device_type = "mps"
    api_version = 1
    # pytorch/pytorch#176981: complex128 can be moved there without an error, and fails in the first operation.
    capabilities = Capabilities(unsupported_dtypes=frozenset({torch.float64, torch.complex128}), host_memory=True)

    def load(self) -> None:
        if not torch.backends.mps.is_built():
            raise UnavailableDeviceError(
                "mps",
                f"torch {torch.__version__} for {platform.system()} was built without Metal",
                "Install torch's own wheel for macOS on Apple silicon.",
            )
        if not torch.backends.mps.is_available():
            raise UnavailableDeviceError(
                "mps", "torch.backends.mps.is_available() is False", "It needs macOS 14 or newer and an Apple GPU."
            )

    def device_count(self) -> int:
        return torch.mps.device_count()

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.mps.synchronize()

    def free_memory(self, device: torch.device) -> int | None:
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
