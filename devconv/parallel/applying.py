"""Running the replicas: one after the other, or each in a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from devconv import registry
from devconv.errors import Refusal, ReplicationRefused

from .batching import Inputs

__all__ = ["apply_in_threads", "apply_in_turn"]


def apply_in_turn(replicas: list[nn.Module], inputs: Sequence[Inputs], devices: Sequence[torch.device]) -> list[Any]:
    """The output of each replica, called one after the other in this thread.

    Args:
        replicas: emptied on the way, so that no variable here keeps a replica in use.
        inputs: positional and keyword inputs of each.
        devices: where each is.

    Raises:
        Exception: what a replica raised, of its own type; the message or a note says which replica and device it was.
    """
    outputs = []
    for position, ((args, kwargs), device) in enumerate(zip(inputs, devices, strict=True)):
        with registry.backend_for(device.type).scope(device):
            try:
                outputs.append(replicas[position](*args, **kwargs))
            except Exception as error:
                _say_where(error, position, len(inputs), device)
                raise
    replicas.clear()
    return outputs


def apply_in_threads(replicas: list[nn.Module], inputs: Sequence[Inputs], devices: Sequence[torch.device]) -> list[Any]:
    """As `apply_in_turn`, all at once. Threads see the caller's context variables, gradient mode and autocast.

    Raises:
        ReplicationRefused: a device's operations must not come from several threads.
    """
    reasons = [
        Refusal(
            "",
            str(device),
            "operations of several threads at once are not safe on this type of device",
            "Leave threads=False: replicas are called in turn, and their devices work at the same time all the same.",
        )
        for device in dict.fromkeys(devices)
        if not registry.backend_for(device.type).capabilities.threads
    ]
    if reasons:
        raise ReplicationRefused(reasons)
    outcomes: list[Any] = [None] * len(inputs)
    modes = _Modes(devices)

    def work(position: int) -> None:
        args, kwargs = inputs[position]
        device = devices[position]
        try:
            with modes.entered(), registry.backend_for(device.type).scope(device):
                outcomes[position] = (True, replicas[position](*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            outcomes[position] = (False, error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, position), name=f"replica-{position}")
        for position in range(len(inputs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replicas.clear()
    for position, (succeeded, outcome) in enumerate(outcomes):
        if not succeeded:
            if isinstance(outcome, Exception):
                _say_where(outcome, position, len(inputs), devices[position])
            raise outcome
    return [outcome for _, outcome in outcomes]


class _Modes:
    """The calling thread's modes of torch, which a new thread does not have."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = []
        for device_type in {device.type for device in devices}:
            if torch.amp.is_autocast_available(device_type):
                enabled = torch.is_autocast_enabled(device_type)
                self._autocast.append((device_type, enabled, torch.get_autocast_dtype(device_type)))

    def entered(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for device_type, enabled, dtype in self._autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
        return stack


def _say_where(error: Exception, position: int, count: int, device: torch.device) -> None:
    where = f"[in replica {position} of {count}, on {device}]"
    if len(error.args) == 1 and isinstance(error.args[0], str) and str(error) == error.args[0]:
        error.args = (f"{error.args[0]} {where}",)
    if where not in str(error):
        # Its text is not its first argument (KeyError, OSError, many vendors' own): leave it whole.
        error.add_note(where)
