"""Run checks in a worker process that is replaced when a check aborts or hangs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from .check import Check, catalogue
from .manifest import parse
from .outcome import Outcome, Result, Status, judge

__all__ = ["Examiner", "run"]

LOAD_SECONDS = 180.0
"""A vendor's library may take long to import, and a runtime long to start."""
_TAIL = 4000


class Examiner:
    """Examines one device type, check by check.

    Args:
        device_type: the ``torch.device.type``.
        manifest: a file of declared gaps; None takes the one beside the backend's module, if there is one.
        imports: modules to import first, such as one that calls `devconv.register`; also found in the current
            directory.
        timeout: seconds after which a check counts as hung.
        stand_in: examine the backend on torch's own ``lazy`` device in place of its own, which may not be there.

    Attributes:
        facts: what the backend says of itself; filled by the first examination.
        missing: why the device is not there; None if it is, or if that is not known yet.
    """

    def __init__(
        self,
        device_type: str,
        *,
        manifest: Path | None = None,
        imports: Sequence[str] = (),
        timeout: float = 60.0,
        stand_in: bool = False,
    ) -> None:
        self.device_type, self.timeout = device_type, timeout
        self.facts: Mapping[str, Any] = {}
        self.missing: str | None = None
        self._load = {"do": "load", "device_type": device_type, "imports": [*imports], "stand_in": stand_in}
        self._gaps = None if manifest is None else parse(manifest.read_text(encoding="utf-8"), str(manifest))
        self._worker: _Worker | None = None
        self._broken: tuple[Status, str, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def examine(self, check: Check) -> Outcome:
        """Run one check and judge it by the declared gaps.

        Raises:
            ManifestError: the manifest beside the backend cannot be used.
        """
        began = time.perf_counter()
        worker = self._ready()
        if worker is None:
            return self._outcome_of_a_broken_load(check)
        moves: list[str] = []
        try:
            answer = worker.ask({"do": "check", "check": check.id}, self.timeout * check.patience, moves.append)
        except _Dead as dead:
            self.close()
            where = f" in {moves[-1]}" if moves else ""
            outcome = Outcome(check, dead.status, f"{dead.why}{where}", dead.tail, time.perf_counter() - began)
        else:
            outcome = Outcome(check, Status(answer["status"]), answer["why"], answer["detail"], answer["seconds"])
        return judge(outcome, self._gaps or {})

    def _ready(self) -> _Worker | None:
        if self._worker is None and self._broken is None:
            worker = _Worker()
            try:
                answer = worker.ask(self._load, LOAD_SECONDS, None)
            except _Dead as dead:
                worker.close()
                self._broken = (dead.status, dead.why, dead.tail)
                return None
            if not answer["loaded"]:
                worker.close()
                self._broken = (Status.FAILED, answer["why"], answer["detail"])
                self.missing = answer["why"] if answer["missing"] else None
                return None
            self.facts = answer["facts"]
            if self._gaps is None:
                self._gaps = parse(self.facts["manifest"], self.facts["manifest_source"] or "no manifest")
            self._worker = worker
        return self._worker

    def _outcome_of_a_broken_load(self, check: Check) -> Outcome:
        assert self._broken is not None
        status, why, detail = self._broken
        if check.id == catalogue()[0].id and self.missing is None:
            return Outcome(check, status, why, detail)
        return Outcome(check, Status.NOT_RUN, self.missing or f"the backend did not load: {why}")


def run(
    device_type: str,
    *,
    checks: Iterable[Check] | None = None,
    manifest: Path | None = None,
    imports: Sequence[str] = (),
    timeout: float = 60.0,
    stand_in: bool = False,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Result:
    """Run the checks on a device.

    Args:
        device_type: the ``torch.device.type``.
        checks: of the `catalogue`; None runs all.
        manifest: as for `Examiner`.
        imports: as for `Examiner`.
        timeout: seconds after which a check counts as hung.
        stand_in: as for `Examiner`.
        on_outcome: called with each outcome as it comes.

    Returns:
        The outcomes, judged by the declared gaps. `Result.ok` says whether the device conforms.

    Raises:
        ManifestError: the manifest cannot be read, or declares a gap in a promise that nobody makes.
    """
    began, outcomes = time.perf_counter(), []
    with Examiner(device_type, manifest=manifest, imports=imports, timeout=timeout, stand_in=stand_in) as examiner:
        for check in catalogue() if checks is None else checks:
            outcome = examiner.examine(check)
            outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
        facts = {**examiner.facts, "missing": examiner.missing, "stand_in": stand_in}
    return Result(device_type, facts, tuple(outcomes), time.perf_counter() - began)


class _Dead(Exception):
    def __init__(self, status: Status, why: str, tail: str) -> None:
        self.status, self.why, self.tail = status, why, tail
        super().__init__(why)


class _Worker:
    """A worker process and the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = Pipe()
        # Closed by `close`; the device may still write to it when this object is gone.
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        descriptor = theirs.fileno()
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", f"{__package__}.worker", str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            start_new_session=True,
        )
        theirs.close()

    def ask(self, request: Mapping[str, Any], seconds: float, on_move: Callable[[str], None] | None) -> dict[str, Any]:
        """The answer to `request`.

        Raises:
            _Dead: the process ended, or did not answer in time.
        """
        deadline = time.monotonic() + seconds
        with suppress(BrokenPipeError):
            self._socket.send_bytes(json.dumps({**request, "seconds": seconds}).encode())
        while True:
            answer = self._receive(deadline, seconds)
            if "move" not in answer:
                return answer
            if on_move is not None:
                on_move(answer["move"])

    def _receive(self, deadline: float, seconds: float) -> dict[str, Any]:
        # In slices: a process that the device forked can keep the socket open after the worker is dead.
        while (left := deadline - time.monotonic()) > 0:
            with suppress(EOFError, ConnectionResetError):
                if self._socket.poll(min(left, 0.25)):
                    answer: dict[str, Any] = json.loads(self._socket.recv_bytes())
                    return answer
                if self._process.poll() is None:
                    continue
            self._process.wait()
            raise _Dead(Status.CRASHED, f"the process died: {_ending(self._process.returncode)}", self._tail())
        self._kill()
        raise _Dead(Status.HUNG, f"no answer after {seconds:g} s", self._tail())

    def _tail(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _TAIL))
        return self._stderr.read().decode(errors="replace")

    def _kill(self) -> None:
        # The whole session: what the worker started goes with it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the process; one that does not go by itself is killed."""
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._kill()
        self._stderr.close()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
