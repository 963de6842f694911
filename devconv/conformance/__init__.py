"""The promises of devconv as a kit that a vendor runs on its own device.

Two ways in: ``devconv check TYPE`` and ``pytest --pyargs devconv.conformance --devconv-device=TYPE``. Both run the
checks of `catalogue` in a worker process, so that a check that aborts or hangs takes only itself down. Importing this
package imports neither torch nor the device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .check import GROUPS as GROUPS
    from .check import Check as Check
    from .check import catalogue as catalogue
    from .lane import Lane as Lane
    from .lane import Move as Move
    from .manifest import ManifestError as ManifestError
    from .outcome import Outcome as Outcome
    from .outcome import Result as Result
    from .outcome import Status as Status
    from .performing import perform as perform
    from .reports import to_json as to_json
    from .reports import to_junit as to_junit
    from .reports import to_markdown as to_markdown
    from .reports import to_text as to_text
    from .running import Examiner as Examiner
    from .running import run as run
    from .skeleton import SkeletonError as SkeletonError
    from .skeleton import write_skeleton as write_skeleton
    from .stand_in import stand_in_for as stand_in_for

_HOME = {
    "GROUPS": "check",
    "Check": "check",
    "Examiner": "running",
    "Lane": "lane",
    "ManifestError": "manifest",
    "Move": "lane",
    "Outcome": "outcome",
    "Result": "outcome",
    "SkeletonError": "skeleton",
    "Status": "outcome",
    "catalogue": "check",
    "perform": "performing",
    "run": "running",
    "stand_in_for": "stand_in",
    "to_json": "reports",
    "to_junit": "reports",
    "to_markdown": "reports",
    "to_text": "reports",
    "write_skeleton": "skeleton",
}


__all__ = sorted(_HOME)  # noqa: PLE0605 - the names are in the table above


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
