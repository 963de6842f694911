"""Promise: two threads may convert two models while a third opens and closes the flag's scope."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import devconv
from tests.moves import STOCK_APPLY, device_is_here, named_tensors, same
from tests.zoo import Recurrent, Tied, fill

RUNS = 200


@pytest.fixture
def hectic() -> Iterator[None]:
    """Threads take turns about as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Crowd:
    """Threads that run to an end together; the first error counts."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.stop = threading.Event()

    def run(self, workers: list[Callable[[], None]], background: Callable[[], None]) -> None:
        barrier = threading.Barrier(len(workers) + 1)

        def guarded(call: Callable[[], None]) -> Callable[[], None]:
            def body() -> None:
                try:
                    barrier.wait(30)
                    call()
                except BaseException as error:  # noqa: BLE001 - reported by the test
                    self.errors.append(error)

            return body

        def loop() -> None:
            while not self.stop.is_set():
                background()

        threads = [threading.Thread(target=guarded(worker)) for worker in workers]
        last = threading.Thread(target=guarded(loop))
        for thread in [*threads, last]:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.stop.set()
        last.join(30)
        assert not any(thread.is_alive() for thread in [*threads, last])
        if self.errors:
            raise self.errors[0]


def whole(model: nn.Module, twin: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Everything that a broken-up conversion would show."""
    assert {(tensor.device, tensor.dtype) for _, tensor in named_tensors(model)} == {(device, dtype)}
    wanted = dict(named_tensors(twin))
    for name, tensor in named_tensors(model):
        assert same(tensor, wanted[name].detach().to(dtype)), name


def worker(
    make: Callable[[], nn.Module], convert: Callable[[nn.Module, int], torch.dtype], runs: int
) -> Callable[[], None]:
    def work() -> None:
        model, twin = fill(make()), fill(make())
        before = dict(model.named_parameters(remove_duplicate=False))
        for run in range(runs):
            dtype = convert(model, run)
            whole(model, twin, torch.device("cpu"), dtype)
            after = dict(model.named_parameters(remove_duplicate=False))
            assert all(after[name] is before[name] for name in before)

    return work


def by_convert(model: nn.Module, run: int) -> torch.dtype:
    dtype = torch.float64 if run % 2 == 0 else torch.float32
    devconv.convert(model, dtype=dtype)
    return dtype


def by_flag(model: nn.Module, run: int) -> torch.dtype:
    dtype = torch.float64 if run % 2 == 0 else torch.float32
    with devconv.registry_conversion():
        model.to(dtype)
    return dtype


def by_swap(model: nn.Module, run: int) -> torch.dtype:
    dtype = torch.float64 if run % 2 == 0 else torch.float32
    with devconv.registry_conversion():
        model._apply(lambda tensor: tensor.to(dtype))
    return dtype


def open_and_close() -> None:
    with devconv.registry_conversion():
        pass


@pytest.mark.timeout(170)
@pytest.mark.parametrize("first", [by_convert, by_flag])
@pytest.mark.parametrize("second", [by_flag, by_swap])
def test_two_conversions_and_a_busy_scope_do_not_meet(
    hectic: None, first: Callable[[nn.Module, int], torch.dtype], second: Callable[[nn.Module, int], torch.dtype]
) -> None:
    workers = [worker(Tied, first, RUNS // 4), worker(Recurrent, second, RUNS // 4)]

    Crowd().run(workers, open_and_close)

    assert nn.Module._apply is STOCK_APPLY


@pytest.mark.timeout(170)
def test_a_scope_in_one_thread_never_reaches_a_conversion_in_another(hectic: None) -> None:
    def stock() -> None:
        for _ in range(RUNS // 4):
            model = fill(Tied())
            model.double()
            assert model.encoder.mask is not model.decoder.mask, "the other thread's scope was seen here"

    Crowd().run([stock], open_and_close)

    assert nn.Module._apply is STOCK_APPLY


@pytest.mark.timeout(170)
def test_one_model_converted_from_two_threads_ends_up_whole(hectic: None) -> None:
    # Nobody can say which dtype wins, but it wins everywhere.
    for _ in range(10):
        model, twin = fill(Tied()), fill(Tied())

        def to(dtype: torch.dtype, model: nn.Module = model) -> Callable[[], None]:
            return lambda: devconv.convert(model, dtype=dtype) and None

        Crowd().run([to(torch.float64), to(torch.float64)], open_and_close)

        whole(model, twin, torch.device("cpu"), torch.float64)


@pytest.mark.timeout(170)
@pytest.mark.skipif(not device_is_here("xla"), reason="needs XLA")
def test_two_threads_move_two_models_to_two_devices(hectic: None) -> None:
    devconv.prepare("xla")

    def move_to(device: str) -> Callable[[], None]:
        def work() -> None:
            model, twin = fill(Tied()), fill(Tied())
            for _ in range(5):
                devconv.convert(model, device)
                whole(model, twin, torch.device(device), torch.float32)
                devconv.convert(model, "cpu")
                whole(model, twin, torch.device("cpu"), torch.float32)

        return work

    Crowd().run([move_to("xla:0"), move_to("xla:1")], open_and_close)


@pytest.mark.timeout(170)
def test_optimizers_of_two_threads_follow_their_own_models(hectic: None) -> None:
    def work() -> None:
        for _ in range(10):
            model = fill(Tied())
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            with devconv.registry_conversion():
                model.double()
            optimizer.step()
            assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float64}

    Crowd().run([work, work], open_and_close)
