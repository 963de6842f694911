"""Skeletons that are waiting to be used again. A replica that somebody still holds is never touched."""

from __future__ import annotations

from .skeleton import Skeleton
from .structure import Structure

__all__ = ["Pool"]


class Pool:
    """The skeletons of one structure. Not for several threads at once."""

    def __init__(self, structure: Structure, kept: int) -> None:
        """An empty pool.

        Args:
            structure: what the skeletons are made for.
            kept: so many idle skeletons, and so many lent ones, are kept track of; what is beyond is forgotten, and
                lives as long as whoever holds it.
        """
        self._structure = structure
        self._kept = kept
        self._idle: list[Skeleton] = []
        self._lent: list[Skeleton] = []

    def take(self) -> Skeleton:
        """A stripped skeleton, an idle one if there is one."""
        return self._idle.pop() if self._idle else Skeleton(self._structure)

    def lend(self, skeleton: Skeleton) -> None:
        """Remember a skeleton whose replica is in use from now on."""
        self._lent.append(skeleton)
        del self._lent[: -self._kept]

    def settle(self) -> None:
        """Strip the replicas that nobody holds any more."""
        lent, self._lent = self._lent, []
        for skeleton in lent:
            if not skeleton.is_free():
                self._lent.append(skeleton)
                continue
            skeleton.strip()
            if len(self._idle) < self._kept:
                self._idle.append(skeleton)

    def outdate(self, stale: set[int]) -> None:
        """Plain attributes of these modules have changed on the originals."""
        for skeleton in [*self._idle, *self._lent]:
            skeleton.stale.update(stale)
