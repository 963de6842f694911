"""A module on several devices of one process: each works on a part of the batch, and gradients meet in the original."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from devconv import registry
from devconv.errors import NotAModuleError

from .applying import apply_in_threads, apply_in_turn
from .batching import Cut, bring, gather
from .replicator import Device, Replicator

__all__ = ["DataParallel"]

T = TypeVar("T", bound=nn.Module)


class DataParallel(nn.Module, Generic[T]):
    """Runs a module on several devices at once, in one process.

    Every forward pass cuts the inputs along the batch dimension, replicates the module, runs the replicas and puts
    their outputs together; backward sums the gradients into the module's own parameters. Train it as the module
    itself: the losses are those of one device, up to the order of floating-point sums, for a loss that is computed
    from the gathered outputs. BatchNorm sees the batch of one replica, and its running statistics are those of the
    first.

    The module must be on ``devices[0]``. What a forward pass assigns on ``self`` is assigned on a replica and lost;
    what it writes in place into parameters and buffers on the first device stays.

    Example:
        >>> model = DataParallel(nn.Linear(2, 3), ["cpu", "cpu"])
        >>> model(torch.ones(5, 2)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        module: T,
        devices: Iterable[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        threads: bool = False,
        keep_prefix: bool = True,
    ) -> None:
        """Wrap a module.

        Args:
            module: on ``devices[0]`` by the time of the first forward pass.
            devices: devices of any types that have a backend, one replica each; one may be named twice. None: every
                device of the module's type.
            output_device: where outputs are put together; None for ``devices[0]``.
            dim: the batch dimension of inputs and outputs.
            threads: call the replicas from one thread each. Worth it where a forward pass waits for its device
                (``.item()``, masks) on more than one eager device; otherwise the devices work at the same time anyway,
                and threads add only their own cost. Refused by devices that cannot take it.
            keep_prefix: names in ``state_dict()`` begin with ``module.``, as torch's own DataParallel has them. False:
                names are the module's own. ``load_state_dict`` takes both, whatever is said here.

        Raises:
            NotAModuleError: `module` is no ``nn.Module``.
            InvalidDeviceError: a device does not exist, or `devices` is empty.
        """
        super().__init__()
        if not isinstance(module, nn.Module):
            raise NotAModuleError(module)
        self.module = module
        self.devices = tuple(
            registry.resolve(device)[0] for device in (_all_of(module) if devices is None else devices)
        )
        if not self.devices:
            raise ValueError("devices is empty: name at least one device, or pass None for all of the module's type")
        self.output_device = self.devices[0] if output_device is None else registry.resolve(output_device)[0]
        self.dim = dim
        self.threads = threads
        self.keep_prefix = keep_prefix
        self._replicator: Replicator[T] | None = None
        self.register_load_state_dict_pre_hook(_accept_both)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output for the whole batch, on `output_device`.

        Args:
            *inputs: tensors in any nesting of lists, tuples, dicts and dataclasses, cut along `dim`; a tensor without
                dimensions or in a `devconv.parallel.Whole` goes to every replica, and so does anything that is no
                tensor. They may be on any device.
            **kwargs: likewise.

        Returns:
            What the module returns, with tensors joined along `dim`; those without dimensions become a vector with
            one element for each replica. A batch smaller than the number of devices uses fewer replicas.

        Raises:
            ReplicationRefused: the module is not on ``devices[0]``, or cannot be replicated as it is. Nothing has run.
            UninitializedTensorError: a parameter is still lazy.
            BatchError: the inputs cannot be cut.
            GatherError: the outputs cannot be joined.
            Exception: what a replica raised, of its own type, with the replica and its device in the message.
        """
        replicator = self._current()
        cut = Cut(inputs, kwargs, len(self.devices), self.dim)
        devices = self.devices[: cut.count]
        if len(self.devices) == 1:
            replicator.check(self.devices[0])
            return bring(apply_in_turn([self.module], cut.send(devices), devices)[0], self.output_device)
        apply = apply_in_threads if self.threads and cut.count > 1 else apply_in_turn
        try:
            outputs = apply(
                replicator(cut.count, detach=not torch.is_grad_enabled(), home=self.devices[0]),  # type: ignore[arg-type]
                cut.send(devices),
                devices,
            )
        finally:
            replicator.release()
        return gather(outputs, self.output_device, self.dim)

    def _current(self) -> Replicator[T]:
        # `module` may be replaced by another, and a copy of this object must not use the original's replicas.
        if self._replicator is None or self._replicator.module is not self.module:
            self._replicator = Replicator(self.module, self.devices)
        return self._replicator

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``; with ``keep_prefix=False`` under the module's own names."""
        if self.keep_prefix:
            return super().state_dict(*args, **kwargs)
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.load_state_dict``, from names with or without ``module.`` in front."""
        if _is_prefixed(self.module, state_dict, ""):
            return super().load_state_dict(state_dict, *args, **kwargs)
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Replicas belong to this object alone: a copy makes its own.
        return {**self.__dict__, "_replicator": None}

    def extra_repr(self) -> str:
        """The devices, for ``print``."""
        return f"devices={[str(device) for device in self.devices]}, output_device={str(self.output_device)!r}"


def _all_of(module: nn.Module) -> list[Device]:
    tensor = next(module.parameters(), next(module.buffers(), None))
    device_type = "cpu" if tensor is None else tensor.device.type
    backend = registry.backend_for(device_type)
    if backend.current_index() is None:
        return [device_type]
    return [torch.device(device_type, index) for index in range(backend.device_count())]


def _is_prefixed(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Whether the names under `prefix` are those of a DataParallel around `module`, or the module's own."""
    own = set(module.state_dict())
    names = [name[len(prefix) :] for name in state_dict if name.startswith(prefix)]
    bare = sum(name in own for name in names)
    prefixed = sum(name.removeprefix("module.") in own for name in names if name.startswith("module."))
    return prefixed >= bare


def _accept_both(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put ``module.`` in front of the names of a checkpoint that has none: inside another module, where the outer
    ``load_state_dict`` looks for them."""
    module = wrapper.module
    assert isinstance(module, nn.Module)
    if not _is_prefixed(module, state_dict, prefix):
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)
