"""The lists of devices that every promise of replication is held to."""

from __future__ import annotations

import pytest

LISTS = {
    "cpu-cpu": (["cpu", "cpu"], ("cpu", 1)),
    "xla-4": (["xla:0", "xla:1", "xla:2", "xla:3"], ("xla", 4)),
    "cpu-xla": (["cpu", "xla:0"], ("xla", 1)),
    "cuda-2": (["cuda:0", "cuda:1"], ("cuda", 2)),
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs(*needs)) for name, (_, needs) in LISTS.items()])
def devices(request):
    """Names of devices; the first is where the original is."""
    return list(LISTS[request.param][0])
