"""Replication over processes and over meshes of devices.

`replicate` makes a module train as one of many copies, in place: over a process group, one process for each copy, or
over a mesh that one process drives. docs/replication.md says which of devconv's four ways to use when.
"""

from __future__ import annotations

from .meshes import Mesh
from .replication import no_sync, release, replicate

__all__ = ["Mesh", "no_sync", "release", "replicate"]
