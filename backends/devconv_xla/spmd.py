"""All XLA devices of the process as one mesh (SPMD), for ``devconv.distributed.replicate(module, mesh=...)``.

One process drives every device: the compiler splits each step over the mesh and puts the averages where they belong.
SPMD is chosen once, before anything asks the XLA runtime for a device, and for the rest of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from devconv import MeshTooLateError

from .starting import check_pair, choose_runtime

__all__ = ["SpmdMesh", "start"]


class SpmdMesh:
    """A mesh of XLA devices along one of whose axes batches are split.

    Args:
        mesh: a ``torch_xla.distributed.spmd.Mesh``, made after `start`.
        axis: name or number of the axis along which the first dimension of inputs is split.
    """

    device_type = "xla"

    def __init__(self, mesh: Any, axis: str | int = 0) -> None:
        self.mesh, self.axis = mesh, axis

    @property
    def size(self) -> int:
        """Number of devices that a batch is split over."""
        number = self.axis if isinstance(self.axis, int) else self.mesh.get_axis_name_idx(self.axis)
        return int(self.mesh.mesh_shape[number])

    def replicate(self, tensors: Sequence[Tensor]) -> None:
        """Keep tensors whole on every device. One that carries a mark already keeps that."""
        for tensor in tensors:
            self._mark(tensor, (None,) * tensor.dim())

    def shard(self, tensors: Sequence[Tensor]) -> None:
        """Split tensors along their first dimension. One that carries a mark already keeps that."""
        for tensor in tensors:
            self._mark(tensor, (self.axis, *(None,) * (tensor.dim() - 1)))

    def _mark(self, tensor: Tensor, spec: tuple[str | int | None, ...]) -> None:
        import torch_xla
        import torch_xla.distributed.spmd as xs

        if not torch_xla._XLAC._get_xla_sharding_spec(tensor):
            xs.mark_sharding(tensor, self.mesh, spec)


def start() -> SpmdMesh:
    """Use all XLA devices as one mesh, from now on: call it before anything else asks for an XLA device.

    Returns:
        A mesh with one axis, ``"data"``, over all devices. Under SPMD the process sees one device, ``xla:0``, which
        stands for all of them.

    Raises:
        MeshTooLateError: a device, or the number of devices, was asked for in this process already. torch_xla would
            warn, and crash with a segmentation fault at a later step (pytorch/xla#9735, #8973).
    """
    check_pair()
    choose_runtime()
    import torch_xla
    import torch_xla.distributed.spmd as xs

    runtime = torch_xla.runtime
    if not runtime.is_spmd():
        if torch_xla._XLAC._xla_get_spmd_config_is_locked():
            raise MeshTooLateError(
                "xla",
                "Call devconv_xla.spmd.start() at the start of the program: before devconv.prepare(), before a model or "
                "a tensor is moved to XLA, and before torch_xla is asked for devices.",
            )
        runtime.use_spmd()
    return SpmdMesh(xs.get_1d_mesh("data"), "data")
