"""Whether a device is there, found out in a process of its own.

Some drivers abort the process, or hang it, where their hardware is missing. A backend that says so
(`Backend.probe_timeout`) is loaded in a child process first, and in this one only if the child lived; `probe` does the
same for any backend, for listings.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from .errors import BackendLoadError, UnavailableDeviceError

__all__ = ["Presence", "ask_a_process", "require"]

_MARK = "devconv-presence:"


@dataclass(frozen=True)
class Presence:
    """What a process of its own found out about a device type.

    Attributes:
        state: ``"there"``, ``"missing"`` (installed, without its hardware or library) or ``"broken"``.
        devices: how many devices there are.
        why: what was wrong; empty if nothing was.
        cure: what to do about it.
    """

    state: str
    devices: int = 0
    why: str = ""
    cure: str = ""


def ask_a_process(target: str, seconds: float) -> Presence:
    """Load a backend in a child process.

    Args:
        target: ``module:class`` of the backend; the child imports it with this process's ``sys.path``.
        seconds: after which the child is killed, with everything that it started.

    Returns:
        What the child said, or how it ended without saying anything.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    child = subprocess.Popen(  # noqa: S603 - ourselves
        [sys.executable, "-m", __name__, target],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Presence("broken", why=f"loading it hangs: no answer after {seconds:g} s", cure=_HANGS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
    said = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    if said:
        return Presence(**json.loads(said[-1]))
    last = errors.strip().splitlines()[-1:] or ["it printed nothing"]
    return Presence("broken", why=f"loading it ends the process ({_ending(child.returncode)}; {last[0]})", cure=_ABORTS)


_HANGS = "Check the device's driver and whether another process holds the device."
_ABORTS = "Check the device's driver and hardware, or uninstall the package; every other device keeps working."


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def require(device_type: str, origin: str, cls: type, seconds: float) -> None:
    """Return if a child process could load a backend.

    Args:
        device_type: the type that it serves.
        origin: where it comes from, for the error.
        cls: its class, which a child process must be able to import.
        seconds: after which it counts as hanging.

    Raises:
        UnavailableDeviceError: its hardware or library is missing.
        BackendLoadError: it raises, aborts or hangs.
    """
    found = ask_a_process(f"{cls.__module__}:{cls.__qualname__}", seconds)
    if found.state == "missing":
        raise UnavailableDeviceError(device_type, found.why, found.cure)
    if found.state == "broken":
        raise BackendLoadError(device_type, origin, found.why, found.cure)


def _look(target: str) -> Presence:
    module, _, name = target.partition(":")
    try:
        backend: Any = attrgetter(name)(import_module(module))()
        backend.load()
        backend.prepare()
        return Presence("there", int(backend.device_count()))
    except UnavailableDeviceError as error:
        return Presence("missing", why=error.why, cure=error.cure)
    except BackendLoadError as error:
        return Presence("broken", why=str(error), cure="")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a library raises is what was seen
        return Presence("broken", why=f"{type(error).__name__}: {error}", cure=_ABORTS)


if __name__ == "__main__":
    sys.stdout.write(f"\n{_MARK}{json.dumps(asdict(_look(sys.argv[1])))}\n")
    sys.stdout.flush()
    # A driver that aborts at exit has already said what was asked.
    os._exit(0)
