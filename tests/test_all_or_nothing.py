"""A conversion that fails anywhere leaves everything as it was.

Faults are injected at every point: at tensor k of the transfer, after and before every line of the commit and of the
undo (a tracing function raises there), in the swap itself, in ``follow`` and inside an overridden ``_apply``; as an error
and as a KeyboardInterrupt. Each time the model, its gradients, hooks, attributes and use counts and its optimizers are
compared with a record from before, and the memory that Python can reach is counted.

``DEVCONV_FAULTS=all`` tries every point, a plain run every n-th of them. Each test records how many it tried
(``--junitxml`` shows them as properties).
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import devconv
from tests.everything import (
    differences,
    everything,
    live_tensors,
    optimizers_of,
    record,
    train_everything,
)
from tests.moves import CONVERSIONS, STOCK_APPLY, Conversion, named_tensors, torch_future
from tests.zoo import fill, loss_of

SPARSELY = os.environ.get("DEVCONV_FAULTS") != "all"
PACKAGE = Path(devconv.__file__).parent
CHANGING = ("conversion.py", "commit.py", "ghost.py", "following.py", "staging.py", "geometry.py", "survey.py")
FAULTS = [RuntimeError, KeyboardInterrupt]

NAMES = ("float64", "float64-swap", "float64-overwrite", "cpu-meta", "cpu-xla:0", "xla:0-cpu", "cpu-cuda:0")
every_conversion = pytest.mark.parametrize(
    "conversion", [pytest.param(c, id=c.name) for c in CONVERSIONS if c.available and c.name in NAMES]
)
every_fault = pytest.mark.parametrize("fault", FAULTS)


class Scene:
    """The model of everything, trained a little, with gradients, a spent graph that is still held, and a live one."""

    def __init__(self, conversion: Conversion) -> None:
        devconv.prepare(conversion.source)
        devconv.prepare(conversion.device)
        self.conversion = conversion
        self.model = everything(conversion.source)
        self.optimizers = optimizers_of(self.model)
        train_everything(self.model, self.optimizers, range(2))
        self.spent = loss_of(self.model, 2)
        self.spent.backward()
        self.live = loss_of(self.model, 3)
        # A device that computes when it is asked to may round otherwise the next time.
        devconv.backend_for(self.model.last.weight.device.type).synchronize()
        self.before = record(self.model, self.optimizers)
        # Asking once makes Python objects that stay, such as those of gradients; only then is the count steady.
        self.before = record(self.model, self.optimizers)

    def convert(self) -> None:
        (hop,) = self.conversion.hops
        with torch_future(self.conversion.future):
            devconv.convert(self.model, hop.device, hop.dtype, optimizers=self.optimizers)

    def differences(self) -> list[str]:
        """What is not as it was; empty after a conversion that failed."""
        assert process_differences() == []
        return differences(self.before, record(self.model, self.optimizers))

    def is_whole(self) -> bool:
        """Whether everything has arrived: the other outcome that leaves nothing half done."""
        (hop,) = self.conversion.hops
        return all(
            tensor.device == self.conversion.device
            and (hop.dtype is None or tensor.dtype is hop.dtype or not tensor.is_floating_point())
            for _, tensor in named_tensors(self.model)
            if not nn.parameter.is_lazy(tensor)
        )

    def trains(self) -> None:
        """The model is not only as it was to look at: its old graph runs, it converts at last, and trains."""
        kept = record(self.model, [])
        self.live.backward()
        assert [
            name for name in differences(kept, record(self.model, [])) if " value:" in name and "grad" not in name
        ] == []
        self.convert()
        assert self.is_whole()
        if self.conversion.has_values:
            last = self.model.last.weight
            before = last.detach().to("cpu", torch.float64).clone()
            train_everything(self.model, self.optimizers, range(4, 5))
            after = last if self.conversion.keeps_objects else self.model.last.weight
            assert not torch.equal(after.detach().to("cpu", torch.float64), before)

    def assert_hooks_and_ties(self) -> None:
        """What hangs on the tensors is there once, after a conversion that a fault could not stop any more."""
        model = self.model
        assert model.decoder.weight is model.encoder.weight
        assert model.decoder.mask is model.encoder.mask
        assert len(model.encoder.weight._backward_hooks) == 1
        assert len(model.encoder.weight._post_accumulate_grad_hooks) == 1


class CrowdScene(Scene):
    """A model of which every tensor is like the others: they go through a conversion in columns."""

    def __init__(self, conversion: Conversion) -> None:
        devconv.prepare(conversion.source)
        devconv.prepare(conversion.device)
        self.conversion = conversion
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
        self.model = fill(nn.Sequential(*layers)).to(conversion.source)
        self.fired: list[str] = []
        self.model[0].weight.register_hook(lambda _: self.fired.append("gradient"))
        self.model[0].weight.register_post_accumulate_grad_hook(lambda _: self.fired.append("accumulation"))
        self.model[1].running_mean.label = "mean"
        self.optimizers = [
            torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9),
            torch.optim.AdamW(self.model[0].parameters(), 0.01),
            torch.optim.AdamW(self.model[5].parameters(), 0.01),
        ]
        self._train(range(2))
        self.before = record(self.model, self.optimizers)
        self.before = record(self.model, self.optimizers)

    def _train(self, steps: range) -> None:
        if self.conversion.source != "meta":
            train_everything(self.model, self.optimizers, steps)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def trains(self) -> None:
        self.convert()
        assert self.is_whole()
        if self.conversion.has_values:
            before = self.model[5].weight.detach().to("cpu", torch.float64).clone()
            self.fired.clear()
            self._train(range(4, 5))
            assert self.fired == ["gradient", "accumulation"] * len(self.optimizers)
            assert not torch.equal(self.model[5].weight.detach().to("cpu", torch.float64), before)

    def assert_hooks_and_ties(self) -> None:
        assert len(self.model[0].weight._backward_hooks) == 1
        assert len(self.model[0].weight._post_accumulate_grad_hooks) == 1


every_scene = pytest.mark.parametrize("stage", [Scene, CrowdScene], ids=["everything", "crowd"])


def process_differences() -> list[str]:
    """What a conversion that failed left behind in the process, outside the model."""
    from devconv import conversion

    found = []
    if nn.Module._apply is not STOCK_APPLY:
        found.append("the hook is installed")
    if conversion.APPLY.is_held:
        found.append("the hook is held")
    if conversion.running():
        found.append("a conversion counts as running")
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        found.append("autograd is switched off")
    if not _free(conversion._commits):
        found.append("the lock of commits is held")
    return found


def _free(lock: Any) -> bool:
    """Whether another thread can take a lock."""
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lock.acquire, timeout=1).result()
        if taken:
            pool.submit(lock.release).result()
    return bool(taken)


@contextmanager
def backend_that_fails(device_type: str, at: int, fault: type[BaseException]) -> Iterator[list[int]]:
    """The device's own backend, raising when it comes to the tensor with the number `at`."""
    original = type(devconv.backend_for(device_type))
    count = [0]

    def counted(tensors: Sequence[Tensor]) -> None:
        for _ in tensors:
            if count[0] == at:
                count[0] += 1
                raise fault(f"injected at tensor {at}")
            count[0] += 1

    class Failing(original):  # type: ignore[misc, valid-type]
        def send(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
            sent = super().send(tensors, *args, **kwargs)
            counted(tensors)
            return sent

        def fetch(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
            fetched = super().fetch(tensors, *args, **kwargs)
            counted(tensors)
            return fetched

        def copy(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
            copies = super().copy(tensors, *args, **kwargs)
            counted(tensors)
            return copies

    devconv.register(Failing, replace=True)
    try:
        yield count
    finally:
        devconv.unregister(device_type)


class LineFault:
    """A tracing function that raises at the n-th line executed in the files that change a model."""

    def __init__(self, at: int, fault: type[BaseException], files: Sequence[str] = CHANGING) -> None:
        self.at, self.fault = at, fault
        self.files = {str(PACKAGE / name) for name in files}
        self.count = 0
        self.where = ""

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        # Leaving a `with` block is an event of its first line too, before its end is called. No interrupt arrives there:
        # Python looks for them after calls, and a call's end lies inside the block.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not text.lstrip().startswith("with "):
            if self.count == self.at:
                self.count += 1
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                raise self.fault(f"injected at {self.where}")
            self.count += 1
        return self._line

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def lines_of(scene: Callable[[], Scene], files: Sequence[str] = CHANGING) -> int:
    """How many lines of some files a whole conversion runs through."""
    fresh = scene()
    with LineFault(-1, RuntimeError, files) as counter:
        fresh.convert()
    assert fresh.is_whole()
    return counter.count


def chosen(total: int, wanted: int) -> Iterator[int]:
    """Every point, or about `wanted` of them spread evenly."""
    return iter(range(0, total, max(total // wanted, 1) if SPARSELY else 1))


def run_into(scene: Scene, fault: type[BaseException]) -> BaseException | None:
    """Convert; the fault that came out, if it did."""
    try:
        scene.convert()
    except BaseException as error:
        if not isinstance(error, fault) and not isinstance(error.__cause__, fault):
            raise
        return error
    return None


@every_scene
@every_conversion
def test_the_scene_converts_whole(stage: type[Scene], conversion: Conversion) -> None:
    scene = stage(conversion)

    scene.convert()

    assert scene.is_whole()
    assert scene.differences() != []


@every_scene
@every_fault
@every_conversion
@pytest.mark.timeout(900)
def test_at_every_tensor_of_the_transfer(
    stage: type[Scene], conversion: Conversion, fault: type[BaseException], record_property: Any
) -> None:
    scene = stage(conversion)
    tried = 0
    device_type = conversion.source.partition(":")[0] if conversion.device.type == "cpu" else conversion.device.type
    for at in range(0, 10_000, 4 if SPARSELY else 1):
        with backend_that_fails(device_type, at, fault):
            error = run_into(scene, fault)
        if error is None:
            break
        del error
        tried += 1
        assert scene.differences() == [], f"after a fault at tensor {at}"
    record_property("faults tried", tried)
    assert tried > (3 if SPARSELY else 12)
    assert scene.is_whole()


@every_scene
@every_fault
@every_conversion
@pytest.mark.timeout(1800)
def test_at_every_line(
    stage: type[Scene], conversion: Conversion, fault: type[BaseException], record_property: Any
) -> None:
    scene = stage(conversion)
    total = lines_of(lambda: stage(conversion))
    outcomes = {"as it was": 0, "whole": 0}
    for at in chosen(total, 25):
        with LineFault(at, fault) as injected:
            error = run_into(scene, fault)
        del error
        found = scene.differences()
        if found == []:
            outcomes["as it was"] += 1
        else:
            # Past the point of no return, only an interrupt can come: everything has arrived.
            assert scene.is_whole(), f"half converted by a fault at {injected.where}: {found[:5]}"
            scene.assert_hooks_and_ties()
            outcomes["whole"] += 1
            scene = stage(conversion)
    record_property("faults tried", sum(outcomes.values()))
    record_property("faults after which all had arrived", outcomes["whole"])
    assert outcomes["as it was"] > (10 if SPARSELY else 30)
    scene.trains()


@every_scene
@every_conversion
@pytest.mark.timeout(1800)
def test_an_interrupt_during_the_undo(
    stage: type[Scene], conversion: Conversion, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    from devconv import following
    from devconv.commit import Commit

    scene = stage(conversion)
    stock_undo = Commit.undo
    second = LineFault(0, KeyboardInterrupt, ("commit.py", "ghost.py"))

    def traced_undo(self: Commit) -> None:
        # The first fault has switched tracing off: a tracing function that raises is removed.
        sys.settrace(second._call)
        try:
            stock_undo(self)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(Commit, "undo", traced_undo)
    monkeypatch.setattr(following, "reconcile", _fails)
    tried = 0
    for at in range(0, 100_000, 23 if SPARSELY else 1):
        second.at, second.count, second.where = at, 0, ""
        error = run_into(scene, (_Injected, KeyboardInterrupt))  # type: ignore[arg-type]
        assert error is not None
        del error
        if not second.where:
            break
        tried += 1
        assert scene.differences() == [], f"after an interrupt at {second.where}"
    monkeypatch.undo()
    record_property("faults tried", tried)
    assert tried > (1 if SPARSELY else 20)
    scene.trains()


class _Injected(RuntimeError):
    pass


def _fails(*_: Any, **__: Any) -> Any:
    raise _Injected("injected in follow")


@every_scene
@every_fault
@every_conversion
def test_in_follow(
    stage: type[Scene], conversion: Conversion, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    # At the first optimizer, and after one or two have already followed.
    from devconv import following

    scene = stage(conversion)
    stock = following.reconcile
    for at in range(3):
        calls = [0]

        def reconcile(*args: Any, calls: list[int] = calls, at: int = at, **kwargs: Any) -> Any:
            if calls[0] == at:
                raise fault("injected in follow")
            calls[0] += 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(following, "reconcile", reconcile)
        assert run_into(scene, fault) is not None
        assert scene.differences() == [], f"at optimizer {at}"
    monkeypatch.undo()
    scene.trains()


@every_fault
@every_conversion
@pytest.mark.parametrize("after", [False, True])
def test_inside_an_overridden_apply(conversion: Conversion, fault: type[BaseException], after: bool) -> None:
    scene = Scene(conversion)
    inner = scene.model.overriding
    stock = type(inner)._apply

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if after:
            stock(inner, fn, recurse)
        raise fault("injected in _apply")

    inner._apply = apply
    scene.before = record(scene.model, scene.optimizers)

    assert run_into(scene, fault) is not None
    assert scene.differences() == []
    del inner._apply
    scene.trains()


@every_scene
@every_fault
@every_conversion
@pytest.mark.parametrize("name", ["swap_impl", "set_accumulate_hooks", "set_backward_hooks"])
def test_at_every_swap_and_every_hook(
    stage: type[Scene],
    conversion: Conversion,
    fault: type[BaseException],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    """Between a swap and the re-linking of its hooks: the n-th call of a primitive raises instead of acting."""
    from devconv import torch_internals as internals

    if stage is CrowdScene and conversion.hops[0].route != "swap":
        pytest.skip("not applicable: nothing is swapped, and no hook is linked again")
    scene = stage(conversion)
    stock = getattr(internals, name)
    tried = 0
    for at in range(0, 10_000, 7 if SPARSELY else 1):
        calls = [0]

        def primitive(*args: Any, calls: list[int] = calls, at: int = at) -> Any:
            calls[0] += 1
            if calls[0] - 1 == at:
                raise fault(f"injected in {name}")
            return stock(*args)

        monkeypatch.setattr(internals, name, primitive)
        error = run_into(scene, fault)
        monkeypatch.setattr(internals, name, stock)
        if error is None:
            break
        del error
        tried += 1
        assert scene.differences() == [], f"at call {at} of {name}"
    record_property("faults tried", tried)
    assert calls[0] > 0


@every_scene
@every_conversion
def test_a_failed_conversion_holds_no_memory(stage: type[Scene], conversion: Conversion) -> None:
    scene = stage(conversion)
    device_type = conversion.source.partition(":")[0] if conversion.device.type == "cpu" else conversion.device.type
    with backend_that_fails(device_type, 7, RuntimeError):
        assert run_into(scene, RuntimeError) is not None
    before = live_tensors()

    for at in (2, 7, 12):
        with backend_that_fails(device_type, at, RuntimeError):
            assert run_into(scene, RuntimeError) is not None

    assert at_most(live_tensors(), before)


def at_most(after: tuple[int, int], before: tuple[int, int]) -> bool:
    """No more tensors and no more bytes; what an earlier test left to be collected may be gone by now."""
    return after[0] <= before[0] and after[1] <= before[1]


@every_scene
@every_conversion
def test_a_failure_in_the_middle_of_the_commit_holds_no_memory(stage: type[Scene], conversion: Conversion) -> None:
    scene = stage(conversion)
    total = lines_of(lambda: stage(conversion), ("commit.py",))

    def fail(at: int) -> bool:
        with LineFault(at, RuntimeError, ("commit.py",)):
            return run_into(scene, RuntimeError) is not None

    assert fail(total // 2)
    before = live_tensors()

    for part in (2, 3, 4):
        assert fail(total * part // 8)

    assert scene.differences() == []
    assert at_most(live_tensors(), before)


def test_the_error_keeps_its_type_and_says_that_the_model_was_put_back() -> None:
    scene = Scene(next(c for c in CONVERSIONS if c.name == "float64"))
    with backend_that_fails("cpu", 3, ZeroDivisionError), pytest.raises(ZeroDivisionError) as caught:
        scene.convert()

    assert scene.differences() == []
    assert caught.value.__traceback__ is not None


class Piecewise:
    """A model of equal layers, for conversions in batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from devconv import conversion

        self.model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(16)))
        self.names = [name for name, _ in self.model.named_parameters()]
        monkeypatch.setattr(conversion, "BATCH_BYTES", 4 * 32 * 32 * 8)  # as doubles, which is what is made

    def converted(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.dtype is torch.float64]


@pytest.mark.parametrize("at", [0, 1, 5, 15])
def test_without_atomicity_the_error_lists_exactly_what_was_converted(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Piecewise(monkeypatch)

    with backend_that_fails("cpu", at, MemoryError), pytest.raises(Exception) as caught:  # noqa: PT011
        devconv.convert(scene.model, dtype=torch.float64, atomic=False)

    listed = list(getattr(caught.value, "converted", ()))
    assert listed == scene.converted()
    assert len(listed) == at // 4 * 4, "four layers are one batch"
    if listed:
        assert all(name in str(caught.value) for name in listed)


def test_without_atomicity_the_extra_memory_is_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    scene = Piecewise(monkeypatch)
    original = type(devconv.backend_for("cpu"))
    seen: list[tuple[StorageWeakRef, int]] = []
    peaks: list[int] = []

    def watch(tensors: Sequence[Tensor]) -> None:
        seen.extend((StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()) for t in tensors)
        peaks.append(sum(size for reference, size in seen if not reference.expired()))

    class Watching(original):  # type: ignore[misc, valid-type]
        def copy(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
            copies = super().copy(tensors, *args, **kwargs)
            watch([*tensors, *copies])
            return copies

    devconv.register(Watching, replace=True)
    try:
        devconv.convert(scene.model, dtype=torch.float64, atomic=False)
    finally:
        devconv.unregister("cpu")

    assert scene.converted() == scene.names
    assert len(peaks) == 4
    # Everything converted so far, plus the old tensors of one batch.
    doubles, floats = 32 * 32 * 8, 32 * 32 * 4
    assert peaks == [(batch + 1) * 4 * doubles + 4 * floats for batch in range(4)]


def test_without_atomicity_a_device_change_is_refused() -> None:
    model = nn.Linear(2, 2)

    with pytest.raises(devconv.ConversionError):
        devconv.convert(model, "meta", atomic=False)

    assert model.weight.device.type == "cpu"


@every_conversion
def test_a_crowd_is_one(conversion: Conversion) -> None:
    from devconv.survey import survey, walk

    inventory = walk(CrowdScene(conversion).model)
    survey(inventory)

    assert inventory.entries == []
    assert sum(map(len, inventory.crowds)) == 16
