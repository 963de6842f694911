"""What the checks stand on: the device under examination, and the conversions that it can make."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import devconv

from .check import NEEDS

__all__ = ["Lane", "Move", "Place"]

_Module = TypeVar("_Module", bound=nn.Module)

_OTHER_FLOATS = (torch.float64, torch.bfloat16, torch.float16)
_ROUNDING = {torch.bfloat16: 4e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Place:
    """A device and the floating dtype of the models there."""

    device: torch.device
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return str(self.device) if self.dtype is torch.float32 else f"{self.device} {str(self.dtype)[6:]}"


class Lane:
    """One device type under examination.

    Nothing happens before an attribute is asked for, so a lane of a device that is not there can be made.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    @cached_property
    def backend(self) -> devconv.Backend:
        """The backend, loaded."""
        return devconv.backend_for(self.device_type)

    @cached_property
    def device(self) -> torch.device:
        """The device that the type alone stands for, with its index."""
        return devconv.resolve(self.device_type)[0]

    @cached_property
    def second(self) -> torch.device | None:
        """Another device of the type, None if the process has one only."""
        if self.device.index is None or self.backend.device_count() < 2:
            return None
        return devconv.resolve(f"{self.device_type}:{1 if self.device.index == 0 else 0}")[0]

    @cached_property
    def is_host(self) -> bool:
        return self.device.type == "cpu"

    @cached_property
    def has_values(self) -> bool:
        return self.backend.capabilities.values

    @cached_property
    def cast(self) -> torch.dtype | None:
        """A floating dtype besides float32 that the device holds: the widest of float64, bfloat16 and float16."""
        return next((dtype for dtype in _OTHER_FLOATS if self.backend.capabilities.holds(dtype)), None)

    @cached_property
    def precision(self) -> float:
        """How far float32 arithmetic on the device is from the host's, relative; at least 1e-4.

        Some devices multiply float32 matrices in a narrower format. That is no broken promise, so it is measured
        first and allowed for.
        """
        if not self.has_values:
            return 1e-4
        numbers = torch.linspace(-1, 1, 16 * 16).reshape(16, 16)
        here = numbers.to(self.device)
        error = ((here @ here).cpu() - numbers @ numbers).abs().max() / (numbers @ numbers).abs().max()
        return max(1e-4, 20 * float(error))

    def lacks(self, needs: tuple[str, ...]) -> str | None:
        """Why a check with these needs is not applicable, None if it is."""
        have = {
            "values": lambda: self.has_values,
            "foreign": lambda: not self.is_host,
            "second": lambda: self.second is not None,
            "autograd": lambda: self.backend.capabilities.autograd,
            "strides": lambda: self.backend.capabilities.strides,
            "aliasing": lambda: self.backend.capabilities.storage_aliasing,
            "lacking": lambda: bool(self.backend.capabilities.unsupported_dtypes),
            "threads": lambda: self.backend.capabilities.threads,
            "own_rng": lambda: self.backend.capabilities.own_rng,
            "cast": lambda: self.cast is not None,
            "installed": lambda: not self.origin.startswith("register("),
        }
        return next((NEEDS[need] for need in needs if not have[need]()), None)

    @property
    def origin(self) -> str:
        """Distribution and version that the backend came from."""
        known = {registration.device_type: registration for registration in devconv.registrations()}
        return known[self.device_type].origin if self.device_type in known else "devconv's defaults"

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The conversions that a check with a ``move`` argument is run for."""
        host, here = Place(torch.device("cpu")), Place(self.device)
        moves = []
        if not self.is_host:
            moves += [Move(self, host, here), Move(self, host, here, "to")]
            if self.has_values:
                moves.append(Move(self, here, host))
            if self.second is not None:
                moves.append(Move(self, here, Place(self.second)))
        if self.cast is not None:
            there = Place(self.device, self.cast)
            moves.append(Move(self, here, there))
            if self.is_host:
                moves += [Move(self, here, there, "to"), Move(self, there, here)]
        return tuple(moves)


@dataclass(frozen=True)
class Move:
    """One conversion. A check asks for it by calling the move, never by calling ``.to`` itself.

    Attributes:
        lane: the lane it belongs to.
        start: where the model is before.
        stop: where it is afterwards.
        door: ``"convert"`` (`devconv.convert`) or ``"to"`` (``module.to`` with the flag on).
    """

    lane: Lane
    start: Place
    stop: Place
    door: str = "convert"

    @property
    def name(self) -> str:
        return f"{self.start} -> {self.stop}" + (" by model.to()" if self.door == "to" else "")

    @property
    def device(self) -> torch.device:
        """Where the model is afterwards."""
        return self.stop.device

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype of the model afterwards."""
        return self.stop.dtype

    @property
    def tolerance(self) -> float:
        """For numbers computed before and after the move, against ones computed on the host in float32."""
        return max(self.lane.precision, *(_ROUNDING.get(place.dtype, 0.0) for place in (self.start, self.stop)))

    def place(self, module: _Module) -> _Module:
        """`module`, made on the host, as it is before the move."""
        return _at(module, self.start)

    def before(self, tensor: Tensor) -> Tensor:
        """A host tensor as an input before the move."""
        return _tensor_at(tensor, self.start)

    def after(self, tensor: Tensor) -> Tensor:
        """A host tensor as an input after the move."""
        return _tensor_at(tensor, self.stop)

    def __call__(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        """Convert `module`, with its optimizers.

        Returns:
            The `devconv.Report`.
        """
        if self.door == "convert":
            return devconv.convert(module, self.device, self.dtype, optimizers=optimizers or None)
        with devconv.registry_conversion():
            module.to(self.device, self.dtype)
        return devconv.last_report()


def _at(module: _Module, place: Place) -> _Module:
    if place != Place(torch.device("cpu")):
        devconv.convert(module, place.device, place.dtype)
    return module


def _tensor_at(tensor: Tensor, place: Place) -> Tensor:
    # By torch itself, so that a backend whose two directions are wrong in the same way is seen.
    dtype = place.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype).to(place.device)
