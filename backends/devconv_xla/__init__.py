"""XLA devices, through torch_xla: TPUs, and the CPU by PJRT.

Whole lists of tensors cross in one call each way, moves between two XLA devices go through the host, and the runtime
is started before the first backward pass wherever that is still possible.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from devconv import Backend, Capabilities, UnavailableDeviceError

from .starting import check_pair, choose_runtime, enable_backward

__all__ = ["UNSUPPORTED", "XlaBackend", "enable_backward"]

# The batched calls would store these as signed integers of the same width, without a word; one by one they stay right.
_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
UNSUPPORTED = frozenset(
    {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4, torch.complex32}
    | {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


class XlaBackend(Backend):
    """Backend for ``xla``. Its tensors are contiguous, and their storages cannot be read from Python."""

    device_type = "xla"
    _torch_xla: Any
    _xlac: Any

    def load(self) -> None:
        check_pair()
        choose_runtime()
        try:
            import torch_xla

            self._torch_xla, self._xlac = torch_xla, torch_xla._XLAC
            self.device_count()
        except (ImportError, OSError, RuntimeError) as error:
            # torch_xla itself is there and fits (see above): what is missing is the runtime that PJRT_DEVICE names.
            raise UnavailableDeviceError(
                "xla",
                f"the runtime PJRT_DEVICE={os.environ.get('PJRT_DEVICE')} does not start: {type(error).__name__}: {error}",
                "Set PJRT_DEVICE to a runtime that this machine has, such as CPU, before the program starts.",
            ) from error
        self.capabilities = Capabilities(
            unsupported_dtypes=UNSUPPORTED,
            strides=False,
            own_rng=True,
            host_memory=os.environ.get("PJRT_DEVICE") == "CPU",
            # pytorch/xla#5005, #9089: threads that trace at once have hung and aborted the process.
            threads=False,
        )

    def prepare(self) -> None:
        # autograd makes one thread per device, once, at the first backward of the process, and knows of XLA's devices
        # only if the runtime was started before that: so start it as early as possible.
        enable_backward()

    def device_count(self) -> int:
        # Under SPMD this is 1: the one virtual device that stands for the whole mesh.
        return int(self._torch_xla.runtime.addressable_device_count())

    def current_index(self) -> int | None:
        return int(self._torch_xla.device().index)

    def send(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        with torch.no_grad():
            cast = _cast(tensors, dtypes)
            if not _UNSIGNED.isdisjoint({tensor.dtype for tensor in cast}):
                return [tensor.detach().to(device) for tensor in cast]
            names = [str(device)] * len(cast)
            try:
                sent: list[Tensor] = self._xlac._xla_tensors_from_aten(cast, names, None)
            except RuntimeError:
                # Lazy conjugates and negatives have no memory of their own to send; few models hold one.
                resolved = [tensor.resolve_conj().resolve_neg() for tensor in cast]
                sent = self._xlac._xla_tensors_from_aten(resolved, names, None)
        return _without_grad(sent)

    def fetch(
        self,
        tensors: Sequence[Tensor],
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for position, tensor in enumerate(tensors):
            by_device[tensor.device].append(position)
        fetched: list[Tensor] = [*tensors]
        with torch.no_grad():
            if len(by_device) > 1:
                # Start every device before waiting for the first one.
                for positions in by_device.values():
                    self._xlac._xla_sync_multi([tensors[position] for position in positions], [], False, False)
            for positions in by_device.values():
                # The call takes tensors of one device only.
                host = self._xlac._xla_get_cpu_tensors([tensors[position] for position in positions])
                for position, tensor in zip(positions, host, strict=True):
                    fetched[position] = tensor
            return _cast(_without_grad(fetched), dtypes)

    def copy(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        copies: list[Tensor] = [*tensors]
        elsewhere = [position for position, tensor in enumerate(tensors) if tensor.device != device]
        with torch.no_grad():
            for position, tensor in enumerate(tensors):
                if tensor.device == device:
                    copies[position] = tensor.detach().to(
                        tensor.dtype if dtypes is None else dtypes[position], copy=True
                    )
            if elsewhere:
                host = self.fetch([tensors[position] for position in elsewhere])
                wanted = None if dtypes is None else [dtypes[position] for position in elsewhere]
                for position, tensor in zip(elsewhere, self.send(host, device, dtypes=wanted), strict=True):
                    copies[position] = tensor
        return copies

    def broadcast(self, tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
        # Everything goes through the host: once, not once for each device.
        for device in {tensor.device for tensor in tensors if tensor.device.type == "xla"}:
            # Reading would run the optimizer's step for these tensors and forget it, to run it again for its momentum,
            # and again with the next pass.
            self._start(device)
        host = self._on_host(tensors)
        return [self.send(host, device) for device in devices]

    def accumulate(self, terms: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
        # The terms are on the host on their way anyway: added there, one tensor goes back instead of several, and the
        # sums add nothing to the graph that is being traced on `device`.
        flat = [term for group in terms for term in group]
        host = iter(self._on_host(flat))
        sums = []
        with torch.no_grad():
            for group in terms:
                total = next(host)
                for _ in group[1:]:
                    total = total + next(host)
                sums.append(total)
        return self.send(sums, device)

    def _on_host(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return tensors
        return self.fetch(tensors)

    @contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        before = self._xlac._xla_get_default_device()
        self._xlac._xla_set_default_device(str(device))
        try:
            yield
            # The replica's outputs are going to be read, and its activations are needed again by the backward pass:
            # computed now and together, while the next replica is being recorded.
            self._start(device)
        finally:
            self._xlac._xla_set_default_device(before)

    def _start(self, device: torch.device) -> None:
        """Begin to compute all that is recorded for `device`, without waiting."""
        # Not during a backward pass: the devices' own threads are recording then, and would find tensors half exchanged.
        if not self.in_backward():
            self._xlac._xla_step_marker(str(device), [], False)

    def synchronize(self, device: torch.device | None = None) -> None:
        targets = [str(device)] if device is not None else [f"xla:{index}" for index in range(self.device_count())]
        for target in targets:
            self._xlac._xla_step_marker(target, [], True)
        # With an argument the call waits for nothing on some releases; without one it waits for every device.
        self._xlac._xla_wait_device_ops([])

    def manual_seed(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._xlac._xla_set_rng_seed(seed, f"xla:{index}")


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None) -> list[Tensor]:
    if dtypes is None:
        return [*tensors]
    return [
        tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]


def _without_grad(fresh: list[Tensor]) -> list[Tensor]:
    """The batched calls copy ``requires_grad`` from their sources; whether a copy needs it is the caller's business."""
    for tensor in fresh:
        if tensor.requires_grad:
            tensor.requires_grad_(False)
    return fresh
