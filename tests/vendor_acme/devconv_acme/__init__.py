"""The vendor's devconv backend: lists of tensors cross in one call each way, and memory is known before it is needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from devconv import Backend, Capabilities, UnavailableDeviceError

__all__ = ["AcmeBackend", "claiming"]


class AcmeBackend(Backend):
    """Backend for ``acme``. It says nothing of its kind, which can be switched: devconv finds out."""

    device_type = "acme"
    api_version = 1
    _acme: Any

    def load(self) -> None:
        import torch_acme

        if torch_acme.device_count() == 0:
            raise UnavailableDeviceError("acme", "its driver finds no device", "Unset ACME_DEVICES, or raise it.")
        self._acme = torch_acme
        self.prepare()

    def prepare(self) -> None:
        # The device can lose its 64-bit floats at any time.
        self.capabilities = Capabilities(
            unsupported_dtypes=frozenset({torch.float64, torch.complex128}) if self.lacks_float64() else frozenset(),
            host_memory=True,
        )
        _enable_backward(self.device_count())

    def lacks_float64(self) -> bool:
        """Whether the device refuses 64-bit floats now."""
        return bool(self._acme._C.refuses_float64())

    def device_count(self) -> int:
        return int(self._acme.device_count())

    def current_index(self) -> int | None:
        return int(self._acme._C.current_device())

    def send(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        return self._copies(tensors, device, dtypes)

    def fetch(
        self,
        tensors: Sequence[Tensor],
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        return self._copies(tensors, torch.device("cpu"), dtypes)

    def copy(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        return self._copies(tensors, device, dtypes)

    def _copies(
        self, tensors: Sequence[Tensor], device: torch.device, dtypes: Sequence[torch.dtype] | None
    ) -> list[Tensor]:
        copies: list[Tensor] = self._acme.copy_list(list(tensors), device, list(dtypes or ()))
        return copies

    def scope(self, device: torch.device) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = torch.acme.device(device.index)  # type: ignore[attr-defined]
        return scope

    def synchronize(self, device: torch.device | None = None) -> None:
        """The device works synchronously."""

    def free_memory(self, device: torch.device) -> int | None:
        free, _ = torch.acme.mem_get_info(device)  # type: ignore[attr-defined]
        return int(free)


_thread = threading.local()


def _enable_backward(count: int) -> None:
    """Let the calling thread go backward through acme tensors, whenever the library was loaded.

    Autograd makes one thread for each device at the first backward pass of the process. If that was before this device
    was known, it has none for it, and a backward pass fails with an internal assertion; without autograd's threads, it
    works.
    """
    if getattr(_thread, "enabled", False):
        return
    with torch.enable_grad():
        probe = torch.ones((), device=f"acme:{count - 1}", requires_grad=True)
        try:
            (probe * 2).backward()
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            torch.autograd.set_multithreading_enabled(False)
    _thread.enabled = True


def claiming(
    *, in_place: bool | None = None, float64: bool | None = None, tells_memory: bool = True
) -> type[AcmeBackend]:
    """A backend that says of its device what it is told to say, true or not.

    Args:
        in_place: what it says of set-data; None leaves it open.
        float64: whether it says that the device has 64-bit floats; None: the truth.
        tells_memory: whether it says how much memory is free.

    Returns:
        A class for ``devconv.register(..., replace=True)``.
    """
    said = in_place

    class Claiming(AcmeBackend):
        in_place = said

        def lacks_float64(self) -> bool:
            return super().lacks_float64() if float64 is None else not float64

        def free_memory(self, device: torch.device) -> int | None:
            return super().free_memory(device) if tells_memory else None

    return Claiming
