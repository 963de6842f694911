"""A device for trying a backend out where its own is not: torch's ``lazy`` device, which runs on the CPU.

Every torch build for Linux has it. It is what most accelerators are: its tensors are of another TensorImpl than the
host's, so that parameters cannot be updated in place on the way; it computes, differentiates and keeps
aliases. It has one device, no strides, and few operators without a fall-back. torch's own stand-in for out-of-tree devices, PrivateUse1, has no implementation without a C++
extension in torch 2.9, and one process can name it once, which a vendor's own library does.
"""

from __future__ import annotations

import sys
from typing import ClassVar

import torch

from devconv import Backend, Capabilities, UnavailableDeviceError, register
from devconv.torch_internals import start_lazy_device, synchronize_lazy_device

__all__ = ["STAND_IN", "stand_in_for"]

STAND_IN = "lazy"
"""Type of the device that stands in."""


def stand_in_for(backend: type[Backend]) -> type[Backend]:
    """`backend` with everything its own but the device, which is the stand-in; registered in this process.

    The subclass replaces `load`, which would import the vendor's library, and what would ask that library: the number
    of devices, the current one, free memory, synchronisation and seeding. The transfers, `resolve` and `prepare` are
    the vendor's.

    Args:
        backend: the class to try out.

    Returns:
        The registered subclass; ``devconv.resolve("lazy")`` gives an instance.

    Raises:
        DuplicateBackendError: another stand-in is registered in this process.
    """
    stand_in = type(f"{backend.__name__}OnStandIn", (_StandIn, backend), {"device_type": STAND_IN})
    register(stand_in)
    return stand_in


class _StandIn(Backend):
    device_type: ClassVar[str] = STAND_IN
    in_place: ClassVar[bool | None] = None
    capabilities = Capabilities(strides=False, host_memory=True)

    def load(self) -> None:
        if "torch_xla" in sys.modules:
            # torch has one place for a lazy backend, and a process that uses both dies by a segmentation fault.
            raise UnavailableDeviceError(
                STAND_IN, "this process has torch_xla, which takes its place", "Use the stand-in in another process."
            )
        if not start_lazy_device():
            raise UnavailableDeviceError(
                STAND_IN,
                f"torch {torch.__version__} was built without its lazy device",
                "Use torch's own wheels for Linux, or test on the real device only.",
            )

    def device_count(self) -> int:
        return 1  # lazy:1 holds tensors, but torch's executor knows one device

    def current_index(self) -> int | None:
        return 0

    def free_memory(self, device: torch.device) -> int | None:
        return None

    def synchronize(self, device: torch.device | None = None) -> None:
        indices = range(self.device_count()) if device is None else [device.index]
        synchronize_lazy_device([f"{STAND_IN}:{index}" for index in indices])

    def manual_seed(self, seed: int) -> None:
        pass  # torch.manual_seed reaches it: it draws from the host's generator
