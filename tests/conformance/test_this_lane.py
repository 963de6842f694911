"""The lane's own devices keep every promise of the kit, as a vendor would see it."""

from __future__ import annotations

import pytest

from devconv.conformance import run, to_text

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize(
    "device_type",
    [
        pytest.param("cpu", marks=pytest.mark.lane("cpu", "newest")),
        pytest.param("meta", marks=pytest.mark.lane("cpu", "newest")),
        pytest.param("xla", marks=[pytest.mark.lane("xla"), pytest.mark.needs("xla", 4)]),
        pytest.param("cuda", marks=[pytest.mark.lane("cuda"), pytest.mark.needs("cuda")]),
        pytest.param("acme", marks=[pytest.mark.lane("acme"), pytest.mark.needs("acme", 2)]),
    ],
)
def test_the_device_keeps_its_promises(device_type):
    result = run(device_type, timeout=180)

    assert result.ok, to_text(result)
