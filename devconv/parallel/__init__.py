"""Replication in one process: copies of a module on several devices, whatever the devices are.

`devconv.replicate` makes replicas once, `devconv.Replicator` keeps them for many calls, and `devconv.DataParallel`
trains with them.
"""

from __future__ import annotations

from .data_parallel import DataParallel
from .nesting import Whole
from .replicator import Replicator, replicate

__all__ = ["DataParallel", "Replicator", "Whole", "replicate"]
