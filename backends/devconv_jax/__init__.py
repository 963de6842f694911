"""JAX's devices, through torchax: CPUs and TPUs that torch reaches as one device, ``jax:0``.

A torchax tensor is an object of torchax's own Python class around a ``jax.Array``, and works only in threads where
torchax is enabled. Loading this backend enables it in the calling thread, and `devconv.prepare` does so in any other.
From then on torchax answers there for *every* device but the CPU: ``tensor.to("meta")`` and ``tensor.to("cuda")`` make
JAX tensors too, which devconv refuses as tensors that did not arrive. So one thread works with JAX or with those.

Whole lists cross in one call each way, always by copies: left to themselves, ``jax.device_put`` and ``jax.Array`` share
memory with the host, and writing to one side would change the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from devconv import Backend, BackendLoadError, Capabilities, UnavailableDeviceError

__all__ = ["JaxBackend"]

_CURE = 'Install the set that belongs together: pip install "devconv[jax]" (torch 2.9, torchax 0.0.13, jax).'

# What crosses unchanged and keeps its dtype there. Types that NumPy lacks cross as integers of their width.
_AS_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_HELD = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.complex64, *_AS_INTEGERS}
)
# JAX computes with them only in its 64-bit mode; without it, it would turn them into 32 bits without a word.
_WIDE = frozenset({torch.float64, torch.complex128})
_EVERY = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))


class JaxBackend(Backend):
    """Backend for ``jax``. torchax has no autograd of torch's, no strides and no aliases; gradients are JAX's business.

    64-bit integers are held as they are. Arithmetic on them gives 32 bits unless JAX's 64-bit mode is on
    (``torchax.enable_accuracy_mode()``), and ``float64`` is refused until it is.
    """

    device_type = "jax"
    api_version = 1
    # torchax answers `parameter.data = tensor` without an error, and leaves dtype and TensorImpl behind.
    in_place = False
    _jax: Any
    _environment: Any
    _tensor: Any

    def load(self) -> None:
        missing = [name for name in ("torchax", "jax") if find_spec(name) is None]
        if missing:
            raise UnavailableDeviceError("jax", f"{' and '.join(missing)} is not installed", _CURE)
        try:
            import jax
            import torchax
            from torchax.tensor import Tensor as JaxTensor
        except AttributeError as error:
            # It looks operators up by name while it is imported, and its metadata pins no torch.
            version = metadata.version("torchax")
            raise BackendLoadError(
                "jax",
                f"torchax {version}",
                f"torchax {version} does not fit torch {torch.__version__}: {error}",
                _CURE,
            ) from error
        try:
            jax.devices()
        except RuntimeError as error:
            raise UnavailableDeviceError(
                "jax", f"JAX finds no device: {error}", "Set JAX_PLATFORMS to a platform that this machine has: cpu."
            ) from error
        self._jax, self._tensor, self._environment = jax, JaxTensor, torchax.default_env()

    def prepare(self) -> None:
        self.capabilities = Capabilities(
            unsupported_dtypes=_EVERY - _HELD - (_WIDE if self._jax.config.jax_enable_x64 else frozenset()),
            strides=False,
            storage_aliasing=False,
            autograd=False,
            own_rng=True,
            host_memory=self._jax.default_backend() == "cpu",
        )
        try:
            torch.empty(0, device="jax")
        except (NotImplementedError, RuntimeError):
            # torchax's modes are the calling thread's; torchax itself knows only whether any thread has them.
            self._environment.enable_torch_modes()

    def device_count(self) -> int:
        # However many JAX has: every torchax tensor says jax:0, and a mesh is JAX's sharding.
        return 1

    def send(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        wanted = _dtypes_of(tensors) if dtypes is None else dtypes
        with torch.no_grad():
            arrays = [self._to_numpy(tensor, dtype) for tensor, dtype in zip(tensors, wanted, strict=True)]
        with self._jax.enable_x64(True):
            return [self._tensor(array, self._environment) for array in self._jax.device_put(arrays)]

    def fetch(
        self,
        tensors: Sequence[Tensor],
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        held = _dtypes_of(tensors)
        wanted = held if dtypes is None else dtypes
        arrays = self._jax.device_get([_array_of(tensor) for tensor in tensors])
        with torch.no_grad():
            return [_from_numpy(array, here).to(dtype) for array, here, dtype in zip(arrays, held, wanted, strict=True)]

    def copy(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        non_blocking: bool = False,
    ) -> list[Tensor]:
        from torchax.ops.mappings import t2j_dtype

        wanted = _dtypes_of(tensors) if dtypes is None else dtypes
        with self._jax.enable_x64(True):
            return [
                self._tensor(self._jax.numpy.array(_array_of(tensor), t2j_dtype(dtype), copy=True), self._environment)
                for tensor, dtype in zip(tensors, wanted, strict=True)
            ]

    def synchronize(self, device: torch.device | None = None) -> None:
        self._jax.block_until_ready(self._jax.live_arrays())

    def free_memory(self, device: torch.device) -> int | None:
        told = self._jax.devices()[0].memory_stats() or {}
        if "bytes_limit" not in told or "bytes_in_use" not in told:
            return None
        return int(told["bytes_limit"] - told["bytes_in_use"])

    def manual_seed(self, seed: int) -> None:
        self._environment.manual_seed(seed)

    def _to_numpy(self, tensor: Tensor, dtype: torch.dtype) -> Any:
        """A NumPy array that nobody else has: JAX may keep it as its own memory."""
        # Into another layout by its values, so lazy conjugates and negatives are resolved on the way.
        values = tensor.detach().to(dtype).clone(memory_format=torch.contiguous_format)
        integers = _AS_INTEGERS.get(dtype)
        if integers is None:
            return values.numpy()
        return values.view(integers).numpy().view(_numpy_name(dtype, self._jax))


def _dtypes_of(tensors: Sequence[Tensor]) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def _numpy_name(dtype: torch.dtype, jax: Any) -> Any:
    """NumPy's name, as JAX extends it, of a dtype of `_AS_INTEGERS`."""
    return jax.numpy.dtype(str(dtype).removeprefix("torch."))


def _array_of(tensor: Any) -> Any:
    """The ``jax.Array`` of a torchax tensor or of one of its views."""
    return tensor.jax()


def _from_numpy(array: Any, dtype: torch.dtype) -> Tensor:
    """A host tensor with memory of its own: what JAX hands out is its own memory, or a copy that it keeps."""
    integers = _AS_INTEGERS.get(dtype)
    copied = array.copy()
    if integers is None:
        return torch.from_numpy(copied)
    return torch.from_numpy(copied.view(str(integers).removeprefix("torch."))).view(dtype)
