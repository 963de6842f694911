"""Before anything is reduced: all ranks are here, and all hold the same module.

A reducer that is built on one rank only, or over parameters in another order, would add up gradients of different
parameters, or wait for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from devconv import torch_internals as internals
from devconv.errors import DevconvError, RankLostError, RanksDisagreeError

from .collecting import Managed
from .groups import Group, served_by, size_of

__all__ = ["agree", "answered", "is_lost_rank"]


def agree(managed: Managed, settings: str, group: Group) -> None:
    """Wait for every rank, and compare what the ranks want to reduce.

    Args:
        managed: this rank's tensors.
        settings: the options of this rank's reducer, as text.
        group: all of its ranks call this.

    Raises:
        RankLostError: a rank did not come within the group's timeout.
        RanksDisagreeError: another rank's tensors differ in name, shape, dtype, device type, or in being trained.
            The same error on every rank.
    """
    rank, size = size_of(group)
    mine = _description(managed, settings)
    with answered("the agreement before the first reduction", rank, size):
        if set(served_by(group).values()) == {"gloo"}:
            # The only barrier that names the ranks that are missing.
            dist.monitored_barrier(group, timeout=internals.timeout_of(group), wait_all_ranks=True)
        digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
        digests: list[str] = [""] * size
        dist.all_gather_object(digests, digest, group)
        other = next((other for other in range(size) if digests[other] != digests[0]), None)
        if other is None:
            return
        everyone: list[list[str]] = [[] for _ in range(size)]
        dist.all_gather_object(everyone, mine, group)
    raise _disagreement(other, everyone[other], everyone[0])


def _description(managed: Managed, settings: str) -> list[str]:
    return [f"the options: {settings}"] + [
        f"{name}: {kind} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
        + (", trained" if tensor.requires_grad else "")
        for kind, found in (("parameter", managed.parameters), ("buffer", managed.buffers))
        for name, tensor in found.items()
    ]


def _disagreement(rank: int, theirs: list[str], first: list[str]) -> RanksDisagreeError:
    for line, reference in zip(theirs, first, strict=False):
        if line != reference:
            name, _, what = line.partition(": ")
            there, _, instead = reference.partition(": ")
            same = name == there
            return RanksDisagreeError(rank, name, f"{what} there, {instead if same else reference} on rank 0")
    longer, holder = (theirs, rank) if len(theirs) > len(first) else (first, 0)
    name, _, what = longer[min(len(theirs), len(first))].partition(": ")
    return RanksDisagreeError(rank, name, f"only rank {holder} has it ({what})")


@contextmanager
def answered(action: str, rank: int, size: int) -> Iterator[None]:
    """Turn the failure of a collective into a `RankLostError` that says what was going on."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise RankLostError(action, rank, size, error) from error


_SIGNS = ("gloo/", "monitoredBarrier", "NCCL", "Timed out waiting", "Connection closed", "Connection reset")


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether torch failed because a rank did not answer; gloo has no error class of its own."""
    if isinstance(error, DevconvError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)
