"""The conversions that every promise is held to, and the object through which a test asks for one.

A conversion says where a model starts, where it goes, and the route that each ordinary parameter must take. A test
never calls ``model.to`` itself: it calls ``move(model)``, so that one test holds for every conversion of the lane, for
both doors (the flag and `devconv.convert`), and can be run against stock torch too, which is how docs/promises.md is
made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import devconv
from tests.zoo import fill

T = TypeVar("T", bound=nn.Module)

STOCK_APPLY = nn.Module._apply
DEVCONV_MODES = ("flag", "convert")
STOCK_MODES = ("stock", "stock-overwrite", "stock-swap")


@dataclass(frozen=True)
class Hop:
    """One call: a target and the route that every ordinary parameter must take to it."""

    device: str | None
    dtype: torch.dtype | None
    route: str


@dataclass(frozen=True)
class Conversion:
    """One line of the table below."""

    name: str
    needs: str
    source: str
    hops: tuple[Hop, ...]
    future: str = ""
    """The ``torch.__future__`` flag that is True during the conversion: ``"swap"``, ``"overwrite"`` or none."""

    @property
    def device(self) -> torch.device:
        named = [hop.device for hop in self.hops if hop.device is not None]
        return torch.device(named[-1] if named else self.source)

    @property
    def dtype(self) -> torch.dtype:
        named = [hop.dtype for hop in self.hops if hop.dtype is not None]
        return named[-1] if named else torch.float32

    @property
    def has_values(self) -> bool:
        return self.device.type != "meta"

    @property
    def keeps_objects(self) -> bool:
        return all(hop.route != "overwrite" for hop in self.hops)

    @property
    def keeps_device(self) -> bool:
        return all(hop.device is None for hop in self.hops)

    @property
    def keeps_dtype(self) -> bool:
        return all(hop.dtype is None for hop in self.hops)

    @property
    def available(self) -> bool:
        return device_is_here(self.needs)


def _one(
    name: str, needs: str, source: str, device: str | None, dtype: torch.dtype | None, route: str, future: str = ""
):
    return Conversion(name, needs, source, (Hop(device, dtype, route),), future)


CONVERSIONS = (
    _one("float64", "cpu", "cpu", None, torch.float64, "set-data"),
    _one("float64-swap", "cpu", "cpu", None, torch.float64, "swap", "swap"),
    _one("float64-overwrite", "cpu", "cpu", None, torch.float64, "overwrite", "overwrite"),
    _one("bfloat16", "cpu", "cpu", None, torch.bfloat16, "set-data"),
    Conversion(
        "float64-and-back",
        "cpu",
        "cpu",
        (Hop(None, torch.float64, "set-data"), Hop(None, torch.float32, "set-data")),
    ),
    _one("cpu-meta", "meta", "cpu", "meta", None, "swap"),
    _one("cpu-xla:0", "xla", "cpu", "xla:0", None, "swap"),
    _one("cpu-xla:0-overwrite", "xla", "cpu", "xla:0", None, "overwrite", "overwrite"),
    _one("xla:0-cpu", "xla", "xla:0", "cpu", None, "swap"),
    _one("xla:0-xla:1", "xla", "xla:0", "xla:1", None, "set-data"),
    _one("xla:0-bfloat16", "xla", "xla:0", None, torch.bfloat16, "set-data"),
    Conversion("cpu-xla:0-cpu", "xla", "cpu", (Hop("xla:0", None, "swap"), Hop("cpu", None, "swap"))),
    _one("cpu-cuda:0", "cuda", "cpu", "cuda:0", None, "set-data"),
    _one("cuda:0-cpu", "cuda", "cuda:0", "cpu", None, "set-data"),
    _one("cuda:0-float64", "cuda", "cuda:0", None, torch.float64, "set-data"),
    Conversion("cpu-cuda:0-cpu", "cuda", "cpu", (Hop("cuda:0", None, "set-data"), Hop("cpu", None, "set-data"))),
    _one("cpu-acme:0", "acme", "cpu", "acme:0", None, "swap"),
    _one("acme:0-cpu", "acme", "acme:0", "cpu", None, "swap"),
    _one("acme:0-acme:1", "acme", "acme:0", "acme:1", None, "set-data"),
)
"""Every conversion of every lane. A lane runs those whose device it has."""

_PACKAGE_OF = {"xla": "torch_xla", "acme": "torch_acme"}


@cache
def device_is_here(device_type: str) -> bool:
    """Whether this environment can run a conversion that needs `device_type`. Starts no XLA runtime."""
    if device_type in ("cpu", "meta"):
        return True
    if device_type == "cuda":
        return torch.cuda.is_available()
    if importlib.util.find_spec(_PACKAGE_OF[device_type]) is None:
        return False
    if device_type == "acme":
        # torch can parse a vendor's device only after the vendor's library was loaded.
        devconv.backend_for(device_type)
    return True


@dataclass
class Move:
    """One conversion through one door. Calling it converts a model and checks the route that was taken.

    Attributes:
        conversion: the line of the table.
        mode: ``"flag"`` or ``"convert"`` (devconv), or one of stock torch's three behaviours.
        report: what devconv reported for the last hop; None for stock torch.
        failed: how a conversion that raised left the model: ``"untouched"`` or ``"half moved"``.
    """

    conversion: Conversion
    mode: str
    report: Any = None
    failed: str | None = None
    refusal_is_kept: bool = field(default=False, repr=False)

    @property
    def by_devconv(self) -> bool:
        return self.mode in DEVCONV_MODES

    @property
    def source(self) -> torch.device:
        return torch.device(self.conversion.source)

    @property
    def device(self) -> torch.device:
        return self.conversion.device

    @property
    def dtype(self) -> torch.dtype:
        return self.conversion.dtype

    @property
    def tolerance(self) -> dict[str, float]:
        """For numbers that were computed on both sides of the move, against ones computed on one side."""
        return {"rtol": 4e-2, "atol": 4e-2} if self.dtype is torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}

    def build(self, make: Callable[[], T], seed: int = 0) -> T:
        """A model that was born on the source device, with the same values on every lane."""
        with torch.device(self.source):
            module = make()
        return fill(module, seed)

    def __call__(self, module: T, *optimizers: torch.optim.Optimizer, route: str | None = "") -> Any:
        """Convert `module` hop by hop.

        Args:
            module: the model.
            optimizers: passed to `devconv.convert`; with the flag they follow by themselves; stock torch has nowhere
                to put them.
            route: what each parameter must take in place of the table's route; None checks nothing.
        """
        for hop in self.conversion.hops:
            before = _fingerprint(module)
            try:
                with torch_future(self.conversion.future if self.by_devconv else self.mode.removeprefix("stock-")):
                    self.report = self._convert(module, hop, optimizers)
            except Exception:
                self.failed = "untouched" if _fingerprint(module) == before else "half moved"
                raise
            if self.by_devconv and route is not None:
                self._check_routes(route or hop.route)
        return self.report

    def back(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Convert `module` to where it was built."""
        self.report = self._convert(module, Hop(self.conversion.source, torch.float32, ""), optimizers)

    def stay(self, module: nn.Module, *optimizers: torch.optim.Optimizer, device: str | None = None) -> None:
        """Convert `module` to where it is already."""
        hop = Hop(device or self.conversion.source, torch.float32, "keep")
        with torch_future("" if self.by_devconv else self.mode.removeprefix("stock-")):
            self.report = self._convert(module, hop, optimizers)

    def _convert(self, module: nn.Module, hop: Hop, optimizers: tuple[torch.optim.Optimizer, ...]) -> Any:
        if self.mode == "convert":
            return devconv.convert(module, hop.device, hop.dtype, optimizers=optimizers or None)
        arguments = {"device": hop.device, "dtype": hop.dtype}
        with devconv.registry_conversion() if self.mode == "flag" else nullcontext():
            moved = module.to(**{key: value for key, value in arguments.items() if value is not None})
        assert moved is module
        return devconv.last_report() if self.mode == "flag" else None

    def apply(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        """Convert `module` by a function of the user's, through ``_apply``, which is a door of the flag alone."""
        if self.mode == "convert":
            pytest.skip("not applicable: devconv.convert takes no function")
        with (
            torch_future(self.conversion.future if self.by_devconv else self.mode.removeprefix("stock-")),
            devconv.registry_conversion() if self.mode == "flag" else nullcontext(),
        ):
            module._apply(function)

    def _check_routes(self, wanted: str) -> None:
        taken = {str(item.route) for item in self.report.items if item.kind == "parameter"} - {"keep"}
        assert taken <= {wanted}, f"{self.conversion.name}: parameters went by {taken}, the table says {wanted!r}"

    @contextmanager
    def refuses(self, *named: str) -> Iterator[pytest.ExceptionInfo[devconv.ConversionRefused]]:
        """The conversion inside must be refused, name each of `named`, and leave the model as it was."""
        self.refusal_is_kept = True
        with pytest.raises(devconv.ConversionRefused if self.by_devconv else Exception) as caught:
            yield caught
        assert self.failed == "untouched"
        if self.by_devconv:
            refused = {reason.name for reason in caught.value.reasons}
            assert set(named) <= refused, f"refused {refused}, expected {named}"

    def expected(self, module: nn.Module) -> dict[str, Tensor]:
        """What every parameter and buffer has to be afterwards, by name: cast on the host, exactly."""
        return {name: self.cast(tensor) for name, tensor in named_tensors(module)}

    def cast(self, tensor: Tensor) -> Tensor:
        """`tensor` on the host, through the dtypes of every hop."""
        value = host(tensor).clone()
        for hop in self.conversion.hops:
            if hop.dtype is not None and value.is_floating_point():
                value = value.to(hop.dtype)
        return value

    def inputs(self, *shape: int, seed: int = 1) -> Tensor:
        """Random numbers, the same on every lane, where the model is after the move."""
        return _numbers(shape, seed).to(device=self.device, dtype=self.dtype)

    def inputs_before(self, *shape: int, seed: int = 1) -> Tensor:
        """The same numbers where the model is before the move."""
        return _numbers(shape, seed).to(device=self.source)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device, dtype=self.dtype)


def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def host(tensor: Tensor) -> Tensor:
    """The tensor's numbers on the CPU, without its graph."""
    return tensor.detach().to("cpu")


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under every name, ties included, non-persistent buffers included."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal in dtype, shape and every bit that counts, wherever the two are."""
    left, right = host(actual), host(expected)
    return left.dtype is right.dtype and left.shape == right.shape and torch.equal(left, right)


def close(actual: Tensor, expected: Tensor, *, rtol: float = 2e-5, atol: float = 2e-5) -> bool:
    """Equal up to rounding, wherever the two are and in whatever dtype."""
    left, right = host(actual).to(torch.float64), host(expected).to(torch.float64)
    return left.shape == right.shape and torch.allclose(left, right, rtol=rtol, atol=atol)


@contextmanager
def torch_future(flag: str) -> Iterator[None]:
    """One of ``torch.__future__``'s two flags for module conversion, for the length of a ``with``."""
    switches = {
        "swap": torch.__future__.set_swap_module_params_on_conversion,
        "overwrite": torch.__future__.set_overwrite_module_params_on_conversion,
    }
    switch = switches.get(flag)
    if switch is None:
        yield
        return
    switch(True)
    try:
        yield
    finally:
        switch(False)


def _fingerprint(module: nn.Module) -> list[tuple[Any, ...]]:
    """Which objects sit in which slots, with what: enough to see that a failed conversion left something moved."""
    seen: list[tuple[Any, ...]] = []
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for slots in (owner._parameters, owner._buffers):
            for key, tensor in slots.items():
                if tensor is None:
                    continue
                grad = tensor.grad if tensor.is_leaf else None
                seen.append(
                    (prefix, key, id(tensor), type(tensor), tensor.device, tensor.dtype, tensor.requires_grad)
                    + ((grad.device, grad.dtype) if grad is not None else ())
                )
    return seen
