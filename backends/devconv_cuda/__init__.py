"""NVIDIA and AMD GPUs, through ``torch.cuda``."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from devconv import Backend, Capabilities, UnavailableDeviceError

__all__ = ["CudaBackend"]


class CudaBackend(Backend):
    """Backend for ``cuda``. torch's caching allocator keeps a source alive until a queued copy has read it."""

    device_type = "cuda"
    capabilities = Capabilities(process_group="nccl")

    def load(self) -> None:
        if not torch.backends.cuda.is_built() and torch.version.hip is None:
            raise UnavailableDeviceError(
                "cuda", f"torch {torch.__version__} was built without CUDA", "Install a CUDA build of torch."
            )
        if not torch.cuda.is_available():
            raise UnavailableDeviceError(
                "cuda", "torch.cuda.is_available() is False", "Check the driver with `nvidia-smi`."
            )

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_index(self) -> int | None:
        return torch.cuda.current_device()

    def scope(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.cuda.device(device)

    def synchronize(self, device: torch.device | None = None) -> None:
        if device is not None:
            torch.cuda.synchronize(device)
        elif torch.cuda.is_initialized():
            for index in range(self.device_count()):
                # Asking a device that nobody uses would give it a context, which takes hundreds of megabytes.
                if torch.cuda.memory_reserved(index):
                    torch.cuda.synchronize(index)

    def free_memory(self, device: torch.device) -> int | None:
        free, _ = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(reusable)
