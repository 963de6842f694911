"""Launches of real processes, each made once and asked for its facts by many tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

_HERE = Path(__file__).parent
LIMIT = 240
"""Seconds after which a launch is stopped; starting Python and torch takes most of it on a busy machine."""


@dataclass
class Launch:
    """A launch that has ended.

    Attributes:
        ranks: how many were started.
        facts: ``facts[rank][case]``, what the case returned there.
    """

    ranks: int
    facts: dict[int, dict]
    code: int
    seconds: float
    output: str

    def of(self, case: str, *ranks: int) -> list[dict]:
        """What `case` returned on every rank, or on `ranks`."""
        wanted = ranks or range(self.ranks)
        missing = [rank for rank in wanted if case not in self.facts.get(rank, {})]
        assert not missing, f"{case} did not run on ranks {missing}:\n{self.output[-4000:]}"
        found = [self.facts[rank][case] for rank in wanted]
        for facts in found:
            assert "traceback" not in facts, f"{case}:\n{facts['traceback']}\n{self.output[-2000:]}"
        return found


def torchrun(folder: Path, cases: str, names: list[str], ranks: int) -> Launch:
    """Run `names` of ``workers/<cases>.py`` on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = _HERE / "workers" / "ranks.py"
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, str(script), str(folder), str(_HERE / "workers" / f"{cases}.py"), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"the launch of {cases} on {ranks} ranks did not end in {LIMIT} s:\n{output[-4000:]}")
    facts = {int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("rank*.json")}
    return Launch(ranks, facts, process.returncode, time.monotonic() - started, output)


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """``launch(cases, names, ranks)``: the facts of one launch of torchrun."""
    return lambda cases, names, ranks: torchrun(tmp_path_factory.mktemp(cases), cases, names, ranks)


@pytest.fixture(scope="session")
def on_mesh():
    """``on_mesh(*cases)``: the facts of each case, from one process of its own with four XLA devices."""

    def run(*cases):
        done = subprocess.run(
            [sys.executable, str(_HERE / "workers" / "mesh.py"), *cases],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
            check=False,
        )
        line = next((line for line in done.stdout.splitlines() if line.startswith("FACTS")), None)
        assert line is not None, f"{cases} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        return json.loads(line.removeprefix("FACTS"))

    return run


@pytest.fixture
def world():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
