"""What a device vendor implements: one subclass of `Backend`, with a default for everything.

The defaults use ``Tensor.to`` alone, so a backend whose class body holds nothing but ``device_type`` already works;
what a vendor overrides makes it faster (`send`, `fetch`, `copy` in batches) or makes its errors clearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import torch_internals as internals
from .errors import InvalidDeviceError, UnavailableDeviceError

__all__ = ["API_VERSION", "OLDEST_API_VERSION", "Backend", "Capabilities"]

API_VERSION = 1
"""The version of this contract. A backend states the one it was written for in ``api_version``."""

OLDEST_API_VERSION = 1
"""The oldest version that this devconv still serves."""


@dataclass(frozen=True)
class Capabilities:
    """What a device can hold and do. The planner reads it before anything is touched.

    Attributes:
        unsupported_dtypes: dtypes that the device cannot store; a conversion that needs one is refused.
        values: the device's tensors hold values. False for ``meta``: tensors are sent there from any device directly.
        strides: the device keeps strides and memory formats. False: tensors arrive contiguous, and the report says so.
        storage_aliasing: two tensors can share one storage on the device.
        autograd: torch's autograd runs on the device.
        own_rng: ``torch.manual_seed`` alone does not seed the device's generator; `Backend.manual_seed` does.
        host_memory: device memory is host memory, so source and target add up on the host during a move.
        threads: several threads may issue operations to the type's devices at once.
        process_group: name of the ``torch.distributed`` backend that reduces the device's tensors, None if there is
            none.
    """

    unsupported_dtypes: frozenset[torch.dtype] = frozenset()
    values: bool = True
    strides: bool = True
    storage_aliasing: bool = True
    autograd: bool = True
    own_rng: bool = False
    host_memory: bool = False
    threads: bool = True
    process_group: str | None = None

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether the device can store `dtype`.

        >>> Capabilities(unsupported_dtypes=frozenset({torch.float64})).holds(torch.float64)
        False
        """
        return dtype not in self.unsupported_dtypes


class Backend:
    """One device type's side of every conversion.

    A package registers its subclass under the entry-point group ``devconv.backends``, with the device type as the
    entry point's name, so that listing the installed backends imports none of them. The class owns both directions of
    its own device (`send` from the host, `fetch` to the host) and moves within it (`copy`); the core composes the rest.

    A backend is made once, on first use of its device, and must be safe to call from several threads.
    """

    device_type: ClassVar[str] = ""
    """The ``torch.device.type`` served, such as ``"cuda"``."""

    api_version: ClassVar[int] = API_VERSION
    """The version of this contract that the backend was written for. State it as a number in your class: what is
    inherited from here is always the installed devconv's own."""

    probe_timeout: ClassVar[float | None] = None
    """Seconds that a process of its own may take to load this backend, before this process loads it. Say it where the
    library aborts or hangs without its hardware: it costs the start of an interpreter, once a process. None loads at
    once. The class must be importable by its name."""

    in_place: ClassVar[bool | None] = None
    """Whether parameters are updated in place (set-data) on the way to and on this device. True and False are the
    vendor's word; None lets devconv try it once on a scratch parameter and remember the answer."""

    capabilities: Capabilities = Capabilities()
    """Of the class, or set on the instance in `load` where only the running system can tell."""

    def load(self) -> None:
        """Import the vendor's library. The only place for heavy imports; called once, before any other method.

        Raises:
            ImportError: the library is missing or broken; devconv turns it into a `BackendLoadError`.
            UnavailableDeviceError: the library is there, the hardware is not. The next use of the device calls `load`
                again.
        """

    def prepare(self) -> None:
        """Start the device's runtime. Called after `load` and again before every conversion that goes to the device.

        This is the place for what must happen before a first backward pass, and for what each thread needs. It must be
        cheap when called again.
        """

    def device_count(self) -> int:
        """Number of devices of this type that the process can use."""
        return 1

    def current_index(self) -> int | None:
        """Index that a device without index stands for; None for a type whose devices have no index (``cpu``)."""
        return 0

    def resolve(self, device: torch.device) -> torch.device:
        """`device` as tensors on it report it: with its index, checked.

        Raises:
            InvalidDeviceError: the index does not exist.
            UnavailableDeviceError: there is no device of this type at all.
        """
        count = self.device_count()
        if count == 0:
            raise UnavailableDeviceError(
                self.device_type,
                f"the process has no {self.device_type} device",
                "Check the driver and the runtime's environment variables.",
            )
        index = device.index if device.index is not None else self.current_index()
        if index is None:
            return torch.device(self.device_type)
        if index >= count:
            have = f"{self.device_type}:0" if count == 1 else f"{self.device_type}:0 .. {self.device_type}:{count - 1}"
            raise InvalidDeviceError(
                str(device),
                f"the process has {count} {self.device_type} device{'s' if count != 1 else ''}",
                f"Use {have}.",
            )
        return torch.device(self.device_type, index)

    def send(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        """Copies of ``T`` host tensors on `device`.

        Args:
            tensors: ``T`` tensors on the CPU, of any shapes and dtypes.
            device: an indexed device of this type.
            dtypes: ``T`` dtypes of the results; None keeps each tensor's own.
            non_blocking: the caller does not need the copies to be complete on return. The backend keeps a source
                alive until its copy has been made.

        Returns:
            ``T`` new tensors of the same shapes (and strides, where the device has them), on `device`, without a
            graph. Never an alias of a source.
        """
        return _copies(tensors, device, dtypes, non_blocking)

    def fetch(
        self,
        tensors: Sequence[Tensor],
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        """Copies on the CPU of ``T`` tensors that are on devices of this type. As `send`, in the other direction."""
        return _copies(tensors, torch.device("cpu"), dtypes, non_blocking)

    def copy(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        """Copies on `device` of ``T`` tensors on devices of this type: between two of them, or a cast on one."""
        return _copies(tensors, device, dtypes, non_blocking)

    def broadcast(self, tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
        """Copies of ``T`` tensors on each of ``D`` devices, for replicas of a model.

        Args:
            tensors: ``T`` tensors, all on the CPU or all on devices of this type.
            devices: ``D`` indexed devices of this type; one may be named twice.

        Returns:
            ``copies[d][t]``: as `send` and `copy` return them, ``D`` times the bytes.
        """
        move = self.send if all(tensor.device.type == "cpu" for tensor in tensors) else self.copy
        return [move(tensors, device) for device in devices]

    def accumulate(self, terms: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
        """Sums of tensors that are on devices of this type, for the gradients of replicas.

        Args:
            terms: ``T`` sums of one term or more each; the terms of one sum have one shape and dtype.
            device: an indexed device of this type.

        Returns:
            ``T`` tensors on `device`, without a graph; a sum of one term that is there already may be the term itself.
            Terms are added in their order.
        """
        flat = [term for group in terms for term in group]
        moved = iter(self.copy([term for term in flat if term.device != device], device))
        there = iter([term if term.device == device else next(moved) for term in flat])
        sums = []
        with torch.no_grad():
            for group in terms:
                total = next(there)
                for _ in group[1:]:
                    total = total + next(there)
                sums.append(total)
        return sums

    def scope(self, device: torch.device) -> AbstractContextManager[object]:
        """While it is entered, the type's name without an index means `device`, in the calling thread.

        For a forward pass that makes tensors with ``device="acme"`` on a replica that is on ``acme:1``.
        """
        return nullcontext()

    @staticmethod
    def in_backward() -> bool:
        """Whether this thread is inside a backward pass, where a device that records must not be made to run."""
        return internals.in_backward()

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until everything queued on `device` (None: on every device of this type) is done."""

    def free_memory(self, device: torch.device) -> int | None:
        """Bytes free on `device`, None where the backend cannot tell. A conversion that needs more is refused."""
        return None

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator where ``torch.manual_seed`` does not reach it (``capabilities.own_rng``)."""

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} for {self.device_type!r}>"


def _copies(
    tensors: Sequence[Tensor], device: torch.device, dtypes: Sequence[torch.dtype] | None, non_blocking: bool
) -> list[Tensor]:
    with torch.no_grad():
        wanted = dtypes if dtypes is not None else [tensor.dtype for tensor in tensors]
        return [
            tensor.detach().to(device=device, dtype=dtype, non_blocking=non_blocking, copy=True)
            for tensor, dtype in zip(tensors, wanted, strict=True)
        ]
