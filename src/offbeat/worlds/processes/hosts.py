"""Hosts of the ranks: which bytes of a collective leave this one."""

from __future__ import annotations

import os
from collections.abc import Sequence


def host_number(global_rank: int, emulated: bool) -> int:
    """Return the number of this rank's host: the global rank of its first process.

    Under an emulated network every rank stands for a host. Without LOCAL_RANK, which launchers set, all ranks
    are taken to be on one host.
    """
    return global_rank if emulated else global_rank - int(os.environ.get("LOCAL_RANK", global_rank))


class Hosts:
    """The hosts of all ranks of a group, as one of the ranks sees them."""

    def __init__(self, rank: int, numbers: Sequence[int]) -> None:
        self._elsewhere = [number != numbers[rank] for number in numbers]
        self._rank = rank

    def left_by_ring(self, nbytes: int) -> int:
        """Return how much of what this rank sends in a ring leaves its host: all goes to the next rank."""
        return nbytes * self._elsewhere[(self._rank + 1) % len(self._elsewhere)]

    def left_by_tree(self, nbytes: int) -> int:
        """Return how much of a broadcast may leave this host: torch does not tell who sends to whom."""
        return nbytes * any(self._elsewhere)

    def left_pairwise(self, nbytes: Sequence[int]) -> int:
        """Return how much leaves this host if rank k is sent `nbytes[k]`."""
        return sum(n for n, elsewhere in zip(nbytes, self._elsewhere, strict=True) if elsewhere)
