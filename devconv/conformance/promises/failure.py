"""What fails leaves the model exactly as it was, says what is wrong, and does not stand in the way of a second try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

import devconv

from ..check import promise
from ..expecting import BrokenPromise, expect, expect_equal, expect_raises
from ..lane import Lane, Move
from ..models import Tied, mlp

_TRANSFERS = ("send", "fetch", "copy")
_MANY = 50


class Injected(RuntimeError):
    """The failure that the checks cause."""


@contextmanager
def instead(
    lane: Lane, replacement: Callable[[Callable[..., Any]], Callable[..., Any]], *methods: str
) -> Iterator[None]:
    """Exchange methods of the backends that a conversion of `lane` can ask: the device's own and the host's.

    Only calls from outside are exchanged: a backend may build one of its methods on another.
    """
    backends = {id(backend): backend for backend in (lane.backend, devconv.backend_for("cpu"))}.values()
    before = [(backend, dict(vars(backend))) for backend in backends]
    for backend in backends:
        for method in methods:
            real = getattr(backend, method)
            setattr(backend, method, _outermost(real, replacement(real)))
    try:
        yield
    finally:
        for backend, attributes in before:
            vars(backend).clear()
            vars(backend).update(attributes)


_inside: ContextVar[bool] = ContextVar("_inside", default=False)


def _outermost(real: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return real(*args, **kwargs)
        token = _inside.set(True)
        try:
            return other(*args, **kwargs)
        finally:
            _inside.reset(token)

    return call


def _picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Objects, places and numbers of a model and its optimizer's state."""
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    picture: list[Any] = []
    for tensor in [*model.parameters(), *model.buffers(), *state]:
        values = None if tensor.is_meta else tensor.detach().cpu().tolist()
        picture.append((id(tensor), str(tensor.device), tensor.dtype, tensor.requires_grad, values))
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            picture.append((id(tensor.grad), str(tensor.grad.device), tensor.grad.dtype))
    return picture


def _trained(move: Move) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = move.place(Tied())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def _fails_at_every_call(lane: Lane, move: Move, error: BaseException) -> None:
    model, optimizer = _trained(move)
    before = _picture(model, optimizer)
    for point in range(1, _MANY):
        calls = 0

        def failing(real: Callable[..., Any], point: int = point) -> Callable[..., Any]:
            def transfer(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == point:
                    raise error
                return real(*args, **kwargs)

            return transfer

        try:
            with instead(lane, failing, *_TRANSFERS):
                move(model, optimizer)
        except BaseException as seen:
            if seen is not error:
                raise
            expect_equal(_picture(model, optimizer), before, f"model and optimizer after transfer {point} failed")
        else:
            expect(calls > 0, "the conversion asked no backend for anything, so nothing could fail")
            return
    raise BrokenPromise(f"the conversion was still asking its backend after {_MANY} calls")


@promise(cure="Make the device's tensors swappable back; keep nothing about a batch in the backend.")
def a_failed_transfer_leaves_everything_as_it_was(lane: Lane, move: Move) -> None:
    """Whichever transfer of a conversion fails: objects, places, numbers, gradients and state are what they were."""
    _fails_at_every_call(lane, move, Injected("injected by the check"))


@promise(cure="See failure.a_failed_transfer_leaves_everything_as_it_was; catch no BaseException in the backend.")
def an_interrupt_leaves_everything_as_it_was(lane: Lane, move: Move) -> None:
    """A KeyboardInterrupt in any transfer leaves model and optimizer as they were."""
    _fails_at_every_call(lane, move, KeyboardInterrupt())


@promise(cure="Keep no state in the backend that a failed batch could spoil.")
def a_second_try_works(lane: Lane, move: Move) -> None:
    """After a conversion that failed, the same conversion succeeds."""

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(*args: Any, **kwargs: Any) -> Any:
            real(*args, **kwargs)
            raise Injected("injected by the check")

        return transfer

    model, optimizer = _trained(move)
    with instead(lane, failing, *_TRANSFERS):
        expect_raises(Injected, lambda: move(model, optimizer), "a conversion whose transfers fail")
    move(model, optimizer)
    expect_equal({parameter.device for parameter in model.parameters()}, {move.device}, "devices after the second try")


@promise(cure="Return from Backend.send(), fetch() and copy() exactly one tensor for each given one.")
def a_short_answer_is_an_error(lane: Lane, move: Move) -> None:
    """A backend that returns one tensor too few is caught before the model is touched."""

    def short(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: real(*args, **kwargs)[:-1]

    model, optimizer = _trained(move)
    before = _picture(model, optimizer)
    with instead(lane, short, *_TRANSFERS):
        expect_raises(devconv.DevconvError, lambda: move(model, optimizer), "a conversion with a tensor missing")
    expect_equal(_picture(model, optimizer), before, "model and optimizer afterwards")


@promise(cure="Report real free memory from Backend.free_memory(), or None.", needs="foreign values")
def what_does_not_fit_is_refused(lane: Lane) -> None:
    """A model that is larger than the device's free memory is refused before anything is touched."""
    model = mlp()
    with instead(lane, lambda real: lambda device: 1, "free_memory"):
        error = expect_raises(
            devconv.ConversionRefused, lambda: devconv.convert(model, lane.device), "a conversion without memory for it"
        )
    expect(str(lane.device) in str(error), f"the refusal does not name {lane.device}: {error}")
    expect_equal({parameter.device.type for parameter in model.parameters()}, {"cpu"}, "devices afterwards")


@promise(cure="Raise devconv.InvalidDeviceError from Backend.resolve() for an index that does not exist.")
def a_device_that_is_not_there_changes_nothing(lane: Lane) -> None:
    """Moving a model to the device after the last one is refused, and the model stays where it is."""
    model = mlp()
    beyond = f"{lane.device_type}:{lane.backend.device_count()}"
    expect_raises(devconv.InvalidDeviceError, lambda: devconv.convert(model, beyond), f"convert(model, {beyond!r})")
    expect_equal({parameter.device.type for parameter in model.parameters()}, {"cpu"}, "devices afterwards")


@promise(cure="List in Capabilities.unsupported_dtypes what the device cannot store.", needs="lacking foreign")
def a_dtype_that_the_device_lacks_is_refused(lane: Lane) -> None:
    """A model with a tensor that the device cannot store is refused, with the tensor's full name."""
    lacking = sorted(lane.backend.capabilities.unsupported_dtypes, key=str)
    dtype = next((dtype for dtype in lacking if dtype.is_floating_point or dtype.is_complex), None)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if dtype is not None:
        model[1].register_buffer("odd", torch.zeros(2, dtype=dtype))
    else:
        model[1].register_buffer("odd", torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, lacking[0]))
    error = expect_raises(
        devconv.ConversionRefused, lambda: devconv.convert(model, lane.device), "converting the model"
    )
    expect("1.odd" in str(error), f"the refusal does not name the buffer 1.odd: {error}")
    expect_equal({parameter.device.type for parameter in model.parameters()}, {"cpu"}, "devices afterwards")
