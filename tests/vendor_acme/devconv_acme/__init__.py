"""The vendor's devconv backend: lists of tensors cross in one call each way, and memory is known before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from devconv import Backend, Capabilities, UnavailableDeviceError

__all__ = ["AcmeBackend", "claiming"]


class AcmeBackend(Backend):
    """Backend for ``acme``. It says nothing of its kind, which can be switched: devconv finds out."""

    device_type = "acme"
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

    def synchronize(self, device: torch.device | None = None) -> None:
        """The device works synchronously."""

    def free_memory(self, device: torch.device) -> int | None:
        free, _ = torch.acme.mem_get_info(device)  # type: ignore[attr-defined]
        return int(free)


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
