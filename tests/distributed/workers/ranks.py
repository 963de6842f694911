"""Runs cases on every rank of a torchrun launch, and writes what each found: ``ranks.py FOLDER CASES-FILE CASE...``.

A case is a function ``case(rank, size)`` that returns facts; the tests judge them. A case that raises is recorded with
its traceback, and ends the launch, since the ranks are no longer in step.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: str, file: str, *names: str) -> None:
    spec = spec_from_file_location("cases", file)
    cases = module_from_spec(spec)
    spec.loader.exec_module(cases)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    facts = {}
    path = Path(folder) / f"rank{rank}.json"
    try:
        for name in names:
            torch.manual_seed(0)
            dist.barrier()
            facts[name] = getattr(cases, name)(rank, size)
            # At once: a case may end its process.
            path.write_text(json.dumps(facts))
    except BaseException:
        facts[name] = {"traceback": traceback.format_exc()}
        raise
    finally:
        path.write_text(json.dumps(facts))
        sys.stdout.flush()
    dist.destroy_process_group()
    # A runtime that stops badly at the very end must not hide what was found.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
