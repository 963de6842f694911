"""The backend loads, and says the truth about its device."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch

import devconv

from ..check import promise
from ..expecting import BrokenPromise, expect, expect_close, expect_equal, expect_raises
from ..lane import Lane
from ..models import numbers

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Twelve numbers that every dtype here holds exactly."""
    whole = torch.arange(12).reshape(3, 4)
    return whole % 2 == 0 if dtype is torch.bool else whole.to(dtype)


@promise(cure="Repair Backend.load() and Backend.prepare(); everything else stands on them.")
def backend_loads(lane: Lane) -> None:
    """The backend loads and serves the device type that it is registered for."""
    expect_equal(lane.backend.device_type, lane.device_type, "device_type of the loaded backend")


@promise(cure="Call torch.utils.rename_privateuse1_backend(...) in Backend.load(), before it returns.")
def torch_knows_the_device_type(lane: Lane) -> None:
    """Once the backend is loaded, torch reads the device type by its name."""
    backend = lane.backend
    try:
        parsed = torch.device(backend.device_type)
    except RuntimeError as error:
        raise BrokenPromise(f"torch.device({lane.device_type!r}) raises: {error}") from error
    expect_equal(parsed.type, lane.device_type, "type of the parsed device")


@promise(cure="Correct Backend.device_count() and current_index(): 0 <= current index < count.")
def count_and_current_index_agree(lane: Lane) -> None:
    """There is a device, and the current index names one of them."""
    count, current = lane.backend.device_count(), lane.backend.current_index()
    expect(isinstance(count, int) and count >= 1, f"device_count() is {count!r}")
    expect(current is None or 0 <= current < count, f"current_index() is {current!r} of {count} devices")


@promise(cure="Return from Backend.resolve() what tensors report as their .device, with the index.")
def resolve_gives_the_device_that_tensors_report(lane: Lane) -> None:
    """The resolved device equals the device of a tensor that was made there, for every index."""
    indices = [""] if lane.device.index is None else [f":{index}" for index in range(lane.backend.device_count())]
    for index in indices:
        name = f"{lane.device_type}{index}"
        made = torch.empty(1, device=name).device
        expect_equal(devconv.resolve(name)[0], made, f"resolve({name!r}) against a tensor made there")


@promise(cure="Return the runtime's current device from Backend.current_index().")
def a_device_without_index_is_the_one_that_torch_takes(lane: Lane) -> None:
    """The type alone means the device on which torch makes a tensor for the type alone."""
    made = torch.empty(1, device=lane.device_type).device
    expect_equal(devconv.resolve(lane.device_type)[0], made, f"resolve({lane.device_type!r})")


@promise(cure="Make Backend.resolve() return an indexed device unchanged.")
def resolving_twice_changes_nothing(lane: Lane) -> None:
    """A resolved device resolves to itself."""
    once = lane.backend.resolve(torch.device(lane.device_type))
    expect_equal(lane.backend.resolve(once), once, "resolve(resolve(device))")


@promise(cure="Raise devconv.InvalidDeviceError from Backend.resolve() for an index that does not exist.")
def an_index_that_does_not_exist_is_refused(lane: Lane) -> None:
    """The device after the last one is refused by name before anything is moved."""
    beyond = f"{lane.device_type}:{lane.backend.device_count()}"
    error = expect_raises(devconv.InvalidDeviceError, lambda: devconv.resolve(beyond), f"resolve({beyond!r})")
    expect(beyond in str(error), f"the error does not name {beyond}: {error}")


@promise(cure="Make Backend.prepare() idempotent: no random numbers, no change of the current device.")
def preparing_again_changes_nothing(lane: Lane) -> None:
    """`prepare` may be called before every conversion: current device, host generator and default dtype stay."""

    def settings() -> tuple[object, ...]:
        generator = hash(bytes(torch.get_rng_state().tolist()))
        return lane.backend.current_index(), torch.get_default_dtype(), torch.is_grad_enabled(), generator

    lane.backend.prepare()
    before = settings()
    lane.backend.prepare()
    expect_equal(settings(), before, "current index, default dtype, grad mode and generator after prepare()")


@promise(cure="Leave Backend.in_place at None, or say what `parameter.data = tensor` does.", needs="foreign")
def the_word_about_in_place_is_true(lane: Lane) -> None:
    """A backend that says that parameters are updated in place has a device that takes ``parameter.data = tensor``."""
    said = lane.backend.in_place
    parameter = torch.nn.Parameter(torch.ones(2))
    arrived = torch.ones(2).to(lane.device)
    try:
        parameter.data = arrived
        works = parameter.device == lane.device
    except (RuntimeError, TypeError):
        works = False
    expect(
        said is not True or works,
        f"in_place is True, but a host parameter's .data cannot be set to a tensor on {lane.device}",
    )


@promise(cure="List the dtype in Capabilities.unsupported_dtypes, or repair its copies.", needs="values")
def the_dtypes_that_are_claimed_are_held(lane: Lane) -> None:
    """Every common dtype that is not declared unsupported arrives in that dtype, bit for bit."""
    for dtype in DTYPES:
        if lane.backend.capabilities.holds(dtype):
            source = sample(dtype)
            (there,) = lane.backend.send([source], lane.device)
            expect_equal(there.dtype, dtype, f"dtype of {dtype} on {lane.device}")
            expect_equal(there.device, lane.device, f"device of {dtype} sent to {lane.device}")
            expect_close(there, source, f"{dtype} sent to {lane.device}")


@promise(cure="Remove from Capabilities.unsupported_dtypes what the device holds.", needs="values lacking")
def the_dtypes_that_are_denied_are_missing(lane: Lane) -> None:
    """A dtype that is declared unsupported really does not arrive: no check is avoided by saying too little."""
    for dtype in lane.backend.capabilities.unsupported_dtypes:
        for source in _some(dtype):
            expect(not _arrives(source, lane.device), f"{dtype} is declared unsupported, but {lane.device} holds it")


def _some(dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor of `dtype`, or none where the host cannot make one."""
    try:
        if dtype in (torch.qint8, torch.quint8, torch.qint32):
            return [torch.quantize_per_tensor(torch.ones(4), 0.5, 0, dtype)]
        return [torch.ones(4).to(dtype)]
    except (RuntimeError, NotImplementedError):
        return []


def _arrives(source: torch.Tensor, device: torch.device) -> bool:
    try:
        there = source.to(device)
        if there.device != device or there.dtype != source.dtype:
            return False
        back = there.cpu()
        return torch.equal(
            *(each.int_repr() if each.is_quantized else each.view(torch.uint8) for each in (back, source))
        )
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return False


@promise(cure="Say True in Capabilities for what the device can do: values, strides, storage_aliasing, autograd.")
def no_ability_is_denied(lane: Lane) -> None:
    """Values, strides, shared storage and autograd are declared missing only where they are."""
    said = lane.backend.capabilities
    if not said.values:
        expect(not _arrives(torch.ones(2), lane.device), f"values=False, but numbers come back from {lane.device}")
        return
    if not said.strides:
        turned = torch.empty(2, 3).t().to(lane.device)
        expect(turned.stride() == (2, 1), f"strides=False, but a transposed tensor keeps its strides on {lane.device}")
    if not said.storage_aliasing:
        expect(not _aliases(lane), f"storage_aliasing=False, but a view on {lane.device} follows its base")
    if not said.autograd:
        expect(not _differentiates(lane), f"autograd=False, but backward() works on {lane.device}")


@promise(cure="Say storage_aliasing=False in Capabilities, or repair views on the device.", needs="values aliasing")
def a_view_follows_its_base(lane: Lane) -> None:
    """What is written into a view on the device is read from its base."""
    expect(_aliases(lane), f"a view on {lane.device} did not follow its base; storage_aliasing is True")


@promise(cure="Say autograd=False in Capabilities, or repair the device's autograd keys.", needs="values autograd")
def backward_runs(lane: Lane) -> None:
    """A backward pass runs on the device and leaves the gradient there."""
    expect(_differentiates(lane), f"backward() on {lane.device} left no right gradient; autograd is True")


def _aliases(lane: Lane) -> bool:
    base = torch.zeros(4).to(lane.device)
    base[1:3].fill_(7.0)
    return bool(torch.equal(base.cpu(), torch.tensor([0.0, 7.0, 7.0, 0.0])))


def _differentiates(lane: Lane) -> bool:
    leaf = numbers(4).to(lane.device).requires_grad_()
    try:
        (leaf * leaf).sum().backward()
    except (RuntimeError, NotImplementedError):
        return False
    if leaf.grad is None or leaf.grad.device != lane.device:
        return False
    return torch.allclose(leaf.grad.cpu(), 2 * numbers(4), rtol=1e-2)


@promise(cure="Return bytes as an int from Backend.free_memory(), or None where it cannot be told.")
def free_memory_is_a_number_of_bytes_or_none(lane: Lane) -> None:
    """The planner can compare free memory with a plan's bytes."""
    free = lane.backend.free_memory(lane.device)
    expect(free is None or (isinstance(free, int) and free >= 0), f"free_memory({lane.device}) is {free!r}")


@promise(cure="Make Backend.synchronize() take one device, or None for all of them.")
def synchronize_takes_one_device_and_all(lane: Lane) -> None:
    """Waiting works for one device and for all of the type."""
    lane.backend.synchronize(lane.device)
    lane.backend.synchronize()


@promise(
    cure="Guard the backend's shared state with a lock, or say threads=False in Capabilities.", needs="values threads"
)
def two_threads_may_use_the_backend_at_once(lane: Lane) -> None:
    """Four threads send and fetch at once, and each gets its own numbers back."""
    start, seen = threading.Barrier(4), []

    def there_and_back(number: float) -> None:
        source = [torch.full((5,), number), torch.full((2, 3), -number)]
        start.wait(30)
        try:
            for _ in range(5):
                lane.backend.prepare()
                back = lane.backend.fetch(lane.backend.send(source, lane.device))
                if not all(torch.equal(a, b) for a, b in zip(back, source, strict=True)):
                    seen.append(f"thread {number:.0f} got other numbers back")
        except Exception as error:  # noqa: BLE001 - reported by the thread that checks
            seen.append(f"thread {number:.0f} raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=there_and_back, args=(float(number),)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect(not seen, "; ".join(seen))


_PROGRAM = "import devconv, torch, torch.nn as nn; devconv.convert(nn.Linear(2, 2), {name!r})"


@promise(
    cure="Shut the runtime down in an atexit handler of your library, before static destructors run.",
    needs="installed",
    patience=5,
)
def a_program_that_used_the_device_ends_cleanly(lane: Lane) -> None:
    """A process that moved a model to the device ends with exit status 0."""
    program = [sys.executable, "-c", _PROGRAM.format(name=lane.device_type)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)  # noqa: S603 - ourselves
    expect_equal(ended.returncode, 0, f"exit status (stderr ends: {ended.stderr[-300:].strip()!r})")
