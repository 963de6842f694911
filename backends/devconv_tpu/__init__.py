"""TPUs, through TorchTPU (``torch_tpu``), whose device is named ``tpu``. Written from its documentation; not run on a
TPU yet. For TPUs by PyTorch/XLA use ``xla``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from devconv import Backend, Capabilities, UnavailableDeviceError

__all__ = ["TpuBackend"]


class TpuBackend(Backend):
    """Backend for ``tpu``. A PrivateUse1 device that mirrors ``torch.cuda`` in ``torch.tpu``; XLA compiles for it.

    The runtime is started in a process of its own first: a machine without a TPU must not take this process down.
    """

    device_type = "tpu"
    api_version = 1
    # Nothing to try in a process of its own where the library is not even installed.
    probe_timeout = 120.0 if find_spec("torch_tpu") is not None else None
    capabilities = Capabilities(own_rng=True)
    _tpu: Any

    def load(self) -> None:
        if find_spec("torch_tpu") is None:
            raise UnavailableDeviceError(
                "tpu",
                "torch_tpu is not installed",
                'Install TorchTPU for your torch; or, for PyTorch/XLA, move to "xla" (pip install "devconv[xla]").',
            )
        # Importing it names the device; making one starts the runtime and registers `torch.tpu`.
        from torch_tpu import api

        api.tpu_device()
        self._tpu = getattr(torch, "tpu")  # noqa: B009 - the module is TorchTPU's, type checkers do not know it
        if not self._tpu.is_available():
            raise UnavailableDeviceError(
                "tpu",
                "torch.tpu.is_available() is False",
                "Check that the machine has a TPU and no other process holds it.",
            )

    def device_count(self) -> int:
        return int(self._tpu.device_count())

    def current_index(self) -> int | None:
        return int(self._tpu.current_device())

    def synchronize(self, device: torch.device | None = None) -> None:
        # Reading one number back waits for what was queued before it; TorchTPU's own call is not public yet.
        for index in range(self.device_count()) if device is None else [device.index]:
            torch.zeros((), device=f"tpu:{index}").cpu()

    def manual_seed(self, seed: int) -> None:
        self._tpu.manual_seed_all(seed)
