"""One process, many devices: the compiler splits the batch over a mesh and averages the gradients by itself.

A module is prepared for it by marks alone: its tensors are kept whole on every device, its inputs are split along
their first dimension. What a mesh is and how tensors are marked is the business of the device's backend; the first
mesh is that of the XLA backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from devconv.errors import Refusal, ReplicationRefused

from .collecting import Managed, Signature, collect, signature_of
from .reducing import tensors_in

__all__ = ["Mesh", "MeshRole"]


@runtime_checkable
class Mesh(Protocol):
    """All devices of one type as one, as the device's backend offers them."""

    @property
    def device_type(self) -> str:
        """The ``torch.device.type`` of the mesh's tensors."""

    @property
    def size(self) -> int:
        """Number of devices that a batch is split over."""

    def replicate(self, tensors: Sequence[Tensor]) -> None:
        """Keep every tensor whole on every device, from now on and in place."""

    def shard(self, tensors: Sequence[Tensor]) -> None:
        """Split every tensor along its first dimension, in place. Values and shapes stay what they are."""


class MeshRole:
    """A module that is replicated over a mesh."""

    def __init__(self, mesh: Mesh, ignored: Sequence[nn.Module]) -> None:
        self._mesh, self._ignored = mesh, tuple(ignored)
        self._managed = Managed()
        self._signature: Signature | None = None
        self.quiet = 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark what is new in the module since the last forward pass, and this pass's inputs."""
        if self._signature is None or signature_of(module, self._managed.skipped) != self._signature:
            self._managed = collect(module, self._ignored)
            whole = self._mark(module)
            self._signature = signature_of(module, self._managed.skipped) if whole else None
        found = tensors_in((args, kwargs))
        inputs = [tensor for tensor in found if tensor.device.type == self._mesh.device_type]
        if found and not inputs:
            raise ReplicationRefused([self._elsewhere("the inputs of the forward pass", found[0])])
        self._mesh.shard([tensor for tensor in inputs if tensor.dim() > 0])

    def after(self, output: Any) -> Any:
        """Nothing is left to do: the averages are part of the compiled backward pass."""
        return output

    def release(self, module: nn.Module) -> None:
        """Mark everything again at the next forward pass."""
        self._signature = None

    def _mark(self, module: nn.Module) -> bool:
        """Mark the module's tensors; False if lazy ones among them have to be marked later.

        A lazy tensor gets its shape in the very pass that begins; without a mark it is whole everywhere too.
        """
        everything = {**self._managed.parameters, **self._managed.buffers}
        tensors = {name: tensor for name, tensor in everything.items() if not is_lazy(tensor)}
        reasons = [
            self._elsewhere(name, tensor)
            for name, tensor in tensors.items()
            if tensor.device.type != self._mesh.device_type
        ]
        if reasons:
            raise ReplicationRefused(reasons)
        self._mesh.replicate([*tensors.values()])
        return len(tensors) == len(everything)

    def _elsewhere(self, name: str, tensor: Tensor) -> Refusal:
        wanted = self._mesh.device_type
        return Refusal(
            name,
            str(tensor.device),
            f"the mesh is one of {wanted} devices",
            f'Move it with devconv.{"move(batch" if name.startswith("the ") else "convert(module"}, "{wanted}").',
        )
