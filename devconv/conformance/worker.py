"""The process in which checks run: it may abort or hang, and only it.

`devconv.conformance.run` starts ``python -m devconv.conformance.worker DESCRIPTOR`` and talks to it over the inherited
socket. What the device prints goes to stderr, which the parent keeps for crash reports.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import platform
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Answer one request after the other until the parent closes the socket."""
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    faulthandler.enable()
    with Connection(descriptor) as parent:
        for request in iter(lambda: _receive(parent), None):
            # A little earlier than the parent gives up, so that the report says where the check was hanging.
            faulthandler.dump_traceback_later(request["seconds"] * 0.9, exit=False)
            try:
                answer = _load(request) if request["do"] == "load" else _check(request["check"], parent)
            finally:
                faulthandler.cancel_dump_traceback_later()
            parent.send_bytes(json.dumps(answer).encode())


def _receive(parent: Connection) -> dict[str, Any] | None:
    try:
        request: dict[str, Any] = json.loads(parent.recv_bytes())
    except (EOFError, OSError):
        return None
    return request


_lanes: list[Any] = []


def _load(request: dict[str, Any]) -> dict[str, Any]:
    import devconv

    from .lane import Lane

    try:
        sys.path.insert(0, str(Path.cwd()))
        for module in request["imports"]:
            import_module(module)
        sys.path.remove(str(Path.cwd()))
        lane = Lane(_stand_in(request["device_type"]) if request["stand_in"] else request["device_type"])
        facts = _facts(lane)
    except Exception as error:  # noqa: BLE001 - whatever a backend raises while it loads is what was seen
        return {
            "loaded": False,
            "missing": isinstance(error, devconv.UnavailableDeviceError),
            "why": f"{type(error).__name__}: {error}",
            "detail": traceback.format_exc(),
        }
    _lanes.append(lane)
    return {"loaded": True, "facts": facts}


def _stand_in(device_type: str) -> str:
    import devconv

    from .stand_in import STAND_IN, stand_in_for

    found = {registration.device_type: registration for registration in devconv.registrations()}
    if device_type not in found:
        raise devconv.UnknownDeviceError(device_type, devconv.known())
    stand_in_for(found[device_type].backend_class())
    return STAND_IN


def _facts(lane: Any) -> dict[str, Any]:
    import torch

    import devconv

    from .manifest import beside

    backend = lane.backend
    module = sys.modules[type(backend).__module__]
    text, source = beside(getattr(module, "__file__", None))
    capabilities = {
        name: sorted(str(dtype) for dtype in value) if isinstance(value, frozenset) else value
        for name, value in dataclasses.asdict(backend.capabilities).items()
    }
    return {
        "backend": f"{type(backend).__module__}.{type(backend).__qualname__}",
        "origin": lane.origin,
        "devices": backend.device_count(),
        "device": str(lane.device),
        "in_place": backend.in_place,
        "capabilities": capabilities,
        "devconv": devconv.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "manifest": text,
        "manifest_source": source,
    }


def _check(name: str, parent: Connection) -> dict[str, Any]:
    from .check import catalogue
    from .performing import perform

    (check,) = [check for check in catalogue() if check.id == name]
    outcome = perform(check, _lanes[0], progress=lambda move: parent.send_bytes(json.dumps({"move": move}).encode()))
    return {
        "status": outcome.status.value,
        "why": outcome.why,
        "detail": outcome.detail,
        "seconds": outcome.seconds,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
