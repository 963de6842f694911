"""What every test stands on: the lane's variables before torch is imported, hardware that may be missing, clean state.

A lane must find its own device: in the ``xla`` lane a test that needs ``xla`` fails where it is missing. Devices of
other lanes are skipped with the reason, unless ``DEVCONV_REQUIRE`` names them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings


def _load_lanes() -> ModuleType:
    # By path: the root of the repository isn't importable in an environment that has devconv as users have it.
    spec = spec_from_file_location("devconv_lanes", Path(__file__).parent.parent / "ci" / "lanes.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


lanes = _load_lanes()
_LANE_WAS_NAMED = "DEVCONV_LANE" in os.environ
LANE = lanes.current().name
os.environ["DEVCONV_LANE"] = LANE
for _name, _value in lanes.current().variables.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402 - torch and torch_xla read the variables when they are imported

STOCK_APPLY = torch.nn.Module._apply

settings.register_profile("lane", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("fuzz", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "lane"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(device_type, count=1): needs so many devices of a type")
    config.addinivalue_line("markers", "lane(*names): runs on these lanes only")


def pytest_report_header() -> str:
    return f"lane: {LANE}, torch {torch.__version__}"


def pytest_sessionstart() -> None:
    if LANE == "xla":
        # A backward pass before the runtime exists would leave autograd without threads for XLA's devices, and every
        # test after it would run on the repaired path. That path has tests of its own, in processes of their own.
        import torch_xla

        torch.empty(1, device=torch_xla.device())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = [item for item in items if any(LANE not in marker.args for marker in item.iter_markers("lane"))]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]


def missing_device(device_type: str, count: int = 1) -> str | None:
    """Why this process cannot use `count` devices of a type, None if it can."""
    import devconv

    try:
        have = devconv.backend_for(device_type).device_count()
    except devconv.DevconvError as error:
        return str(error)
    return None if have >= count else f"needs {count} {device_type} devices, the process has {have}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = {LANE} if _LANE_WAS_NAMED else {LANE, *lanes.required()}
    for marker in item.iter_markers("needs"):
        reason = missing_device(*marker.args, **marker.kwargs)
        if reason is not None and marker.args[0] in required:
            pytest.fail(f"the {marker.args[0]} lane must not skip: {reason}", pytrace=False)
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(scope="session")
def lane() -> str:
    """Name of the lane, as in ci/lanes.py."""
    return LANE


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Seeds every test alike, and fails the one that leaves devconv's hook or one of torch's flags behind."""
    torch.manual_seed(0)
    flags = torch.__future__
    before = (
        flags.get_overwrite_module_params_on_conversion(),
        flags.get_swap_module_params_on_conversion(),
        torch.get_default_dtype(),
    )
    yield
    after = (
        flags.get_overwrite_module_params_on_conversion(),
        flags.get_swap_module_params_on_conversion(),
        torch.get_default_dtype(),
    )
    assert torch.nn.Module._apply is STOCK_APPLY, "the test left devconv's hook on nn.Module._apply"
    assert after == before, "the test left torch's conversion flags or default dtype changed"
