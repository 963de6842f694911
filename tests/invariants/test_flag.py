"""Promise: the flag is process-wide, its scope is the context's, and off means stock torch's own function."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import devconv
from tests.moves import STOCK_APPLY
from tests.zoo import Tied, fill


@pytest.fixture(autouse=True)
def flag_is_off_afterwards() -> Iterator[None]:
    yield
    devconv.__future__.set_registry_conversion(False)


def goes_by_devconv() -> bool:
    """Whether a conversion, here and now, keeps what stock torch loses: a tie between two buffers."""
    model = fill(Tied()).double()
    assert model.encoder.mask is not model.decoder.mask or _converted_tied(model)
    return model.encoder.mask is model.decoder.mask


def _converted_tied(model: nn.Module) -> bool:
    return bool(model.encoder.mask.dtype is torch.float64)


def in_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join(30)
    assert results, "the thread did not finish"
    return results[0]


def test_it_is_off_at_first() -> None:
    assert not devconv.get_registry_conversion()
    assert not goes_by_devconv()
    assert nn.Module._apply is STOCK_APPLY


def test_the_setter_switches_it_on_and_off() -> None:
    devconv.__future__.set_registry_conversion(True)
    on = (devconv.get_registry_conversion(), devconv.__future__.get_registry_conversion(), goes_by_devconv())
    devconv.__future__.set_registry_conversion(False)

    assert on == (True, True, True)
    assert not devconv.get_registry_conversion()
    assert not goes_by_devconv()


def test_the_setter_holds_in_every_thread() -> None:
    devconv.__future__.set_registry_conversion(True)

    assert in_thread(devconv.get_registry_conversion)
    assert in_thread(goes_by_devconv)


def test_setting_it_twice_is_undone_by_once() -> None:
    devconv.__future__.set_registry_conversion(True)
    devconv.__future__.set_registry_conversion(True)
    devconv.__future__.set_registry_conversion(False)

    assert nn.Module._apply is STOCK_APPLY


def test_a_scope_ends_with_its_block() -> None:
    with devconv.registry_conversion():
        inside = (devconv.get_registry_conversion(), goes_by_devconv())

    assert inside == (True, True)
    assert not devconv.get_registry_conversion()
    assert nn.Module._apply is STOCK_APPLY


def test_a_scope_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), devconv.registry_conversion():
        raise KeyError

    assert not devconv.get_registry_conversion()
    assert nn.Module._apply is STOCK_APPLY


def test_scopes_nest() -> None:
    with devconv.registry_conversion():
        with devconv.registry_conversion():
            pass
        between = goes_by_devconv()

    assert between
    assert nn.Module._apply is STOCK_APPLY


def test_a_scope_is_not_seen_by_other_threads() -> None:
    with devconv.registry_conversion():
        elsewhere = (in_thread(devconv.get_registry_conversion), in_thread(goes_by_devconv))

    assert elsewhere == (False, False)


def test_a_scope_goes_where_its_context_goes() -> None:
    with devconv.registry_conversion():
        context = contextvars.copy_context()
        elsewhere = in_thread(lambda: context.run(goes_by_devconv))

    assert elsewhere


def test_a_scope_can_switch_it_off_for_its_block() -> None:
    devconv.__future__.set_registry_conversion(True)
    with devconv.registry_conversion(False):
        inside = goes_by_devconv()

    assert not inside
    assert goes_by_devconv()


def test_tasks_of_one_loop_have_scopes_of_their_own() -> None:
    async def scoped(first: asyncio.Event, second: asyncio.Event) -> bool:
        with devconv.registry_conversion():
            first.set()
            await second.wait()
            return goes_by_devconv()

    async def bare(first: asyncio.Event, second: asyncio.Event) -> bool:
        await first.wait()
        found = goes_by_devconv()
        second.set()
        return found

    async def both() -> list[bool]:
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(scoped(first, second), bare(first, second))

    assert asyncio.run(both()) == [True, False]


def test_scopes_that_close_out_of_order_leave_stock_torch() -> None:
    first, second = devconv.registry_conversion(), devconv.registry_conversion()
    opened, done = threading.Event(), threading.Event()

    def hold() -> None:
        with second:
            opened.set()
            done.wait(30)

    with first:
        thread = threading.Thread(target=hold)
        thread.start()
        opened.wait(30)
    while_other_is_open = nn.Module._apply
    done.set()
    thread.join(30)

    assert while_other_is_open is not STOCK_APPLY
    assert nn.Module._apply is STOCK_APPLY


def test_a_patch_that_someone_else_put_on_top_is_left_alone() -> None:
    devconv.__future__.set_registry_conversion(True)
    ours = nn.Module._apply
    calls: list[str] = []

    def theirs(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        calls.append(type(self).__name__)
        return ours(self, fn, recurse)

    nn.Module._apply = theirs
    try:
        devconv.__future__.set_registry_conversion(False)
        left = nn.Module._apply
        model = fill(Tied()).double()
    finally:
        nn.Module._apply = STOCK_APPLY

    assert left is theirs
    assert "Tied" in calls
    assert model.encoder.weight.dtype is torch.float64
    assert model.encoder.mask is not model.decoder.mask, "ours is off: through it, stock torch answers"


def test_a_patch_that_was_there_before_is_there_afterwards() -> None:
    calls: list[str] = []

    def theirs(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        calls.append(type(self).__name__)
        return STOCK_APPLY(self, fn, recurse)

    nn.Module._apply = theirs
    try:
        with devconv.registry_conversion():
            pass
        afterwards = nn.Module._apply
    finally:
        nn.Module._apply = STOCK_APPLY

    assert afterwards is theirs


def test_convert_needs_no_flag_and_installs_nothing() -> None:
    model = fill(Tied())

    devconv.convert(model, dtype=torch.float64)

    assert model.encoder.mask is model.decoder.mask
    assert nn.Module._apply is STOCK_APPLY


def test_a_report_is_the_threads_own() -> None:
    with devconv.registry_conversion():
        fill(Tied()).double()
    mine = devconv.last_report()

    def other() -> Any:
        with devconv.registry_conversion():
            fill(nn.Linear(1, 1)).double()
        return devconv.last_report()

    theirs = in_thread(other)

    assert devconv.last_report() is mine
    assert len(theirs.items) < len(mine.items)


CHILD = """
import sys
import torch
stock = torch.nn.Module._apply
import devconv
assert torch.nn.Module._apply is stock
assert not any(name.startswith(("torch_xla", "devconv_")) for name in sys.modules), sorted(sys.modules)
assert not devconv.get_registry_conversion()
torch.nn.Linear(2, 2).double()
assert not any(name.startswith(("torch_xla", "devconv_")) for name in sys.modules)
"""


@pytest.mark.timeout(120)
def test_importing_the_package_changes_nothing() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=100, check=False)

    assert (child.returncode, child.stderr) == (0, "")
