"""A thousand steps leave nothing behind."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch
from torch import nn

import devconv
from tests.zoo import Normed, Recurrent, fill

MIB = 2**20


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def growth(model, optimizer, x, steps):
    """Python objects and bytes of memory that `steps` steps leave, after as many to warm up as the allocator needs."""
    for _ in range(steps // 4):
        step(model, optimizer, x)
    gc.collect()
    objects, memory = len(gc.get_objects()), psutil.Process().memory_info().rss
    for _ in range(steps):
        step(model, optimizer, x)
    gc.collect()
    return len(gc.get_objects()) - objects, psutil.Process().memory_info().rss - memory


@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", [Normed, Recurrent])
def test_a_thousand_steps_leave_no_object_and_no_memory(make):
    # Big enough that one copy left behind in each step would be 200 MB.
    module = nn.Sequential(fill(make()), nn.Linear(2, 10_000), nn.Linear(10_000, 2))
    model = devconv.DataParallel(module, ["cpu", "cpu"])

    objects, memory = growth(model, torch.optim.SGD(module.parameters(), lr=1e-3), torch.ones(4, 4), 1000)

    assert objects < 50
    assert memory < 30 * MIB


@pytest.mark.timeout(900)
@pytest.mark.needs("xla", 2)
def test_steps_on_xla_leave_no_object_and_no_memory():
    module = fill(Normed()).to("xla:0")
    model = devconv.DataParallel(module, ["xla:0", "xla:1"])

    objects, memory = growth(model, torch.optim.SGD(module.parameters(), lr=1e-3), torch.ones(4, 4), 200)

    assert objects < 50
    assert memory < 30 * MIB


@pytest.mark.needs("xla", 2)
def test_steps_on_xla_compile_nothing_new_after_the_first_though_nobody_calls_sync():
    from torch_xla.debug import metrics

    module = fill(Recurrent()).to("xla:0")
    model = devconv.DataParallel(module, ["xla:0", "xla:1"])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    # What other tests have recorded and not run would be part of the first programs, and of no other.
    gc.collect()
    devconv.backend_for("xla").synchronize()
    programs = []
    for _ in range(6):
        step(model, optimizer, torch.ones(4, 4))
        programs.append(metrics.counter_value("UncachedCompile"))

    assert programs[0] > 0
    assert programs[3:] == programs[2:-1]


def test_a_module_that_changes_in_every_step_leaves_nothing(tmp_path):
    module = fill(Normed())
    model = devconv.DataParallel(module, ["cpu", "cpu"])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def changing(x):
        module.step = getattr(module, "step", 0) + 1
        module.extra = nn.Linear(1, 1)
        return model(x)

    objects, _ = growth(changing, optimizer, torch.ones(4, 4), 100)

    assert objects < 50
