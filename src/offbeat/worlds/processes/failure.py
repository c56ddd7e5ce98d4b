"""Roll call: finds out, through the rendezvous store, who is missing when an operation fails.

A rank that leaves says so, with the reason. When an operation fails or takes too long, every rank that
notices answers the roll; who neither answers nor said goodbye is named as missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import Store

from offbeat.errors import RankLost

GRACE_S = 5.0  # how long the others get to notice the same failure and answer


class FailureDetector:
    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store = store
        self.rank = rank
        self.world = world

    def leave(self, operations: int, reason: str) -> None:
        """Say goodbye: after so many operations, because of `reason` (empty: the loop has ended)."""
        self.store.set(f"left/{self.rank}", f"{operations}:{reason}")

    def await_goodbyes(self, patience_s: float) -> None:
        """Stay until all have left, so that nobody loses a peer or the store in mid-operation."""
        if not self._wait(lambda: not self._silent(), patience_s) or self._names("failed"):
            others = sorted({*self._silent(), *self._names("failed")})
            raise RankLost(
                f"rank {self.rank} has ended its loop, but rank {', '.join(map(str, others))} has not: "
                "unless it died, give every rank the same number of batches (for example drop_last=True)"
            )
        self.store.set(f"seen/{self.rank}", "")
        if self.rank == 0:  # which may hold the store: the others look into it until they have seen the same
            looking = {rank for rank, (_, reason) in self._left().items() if not reason}
            self._wait(lambda: looking <= {*self._names("seen")}, patience_s)

    def check(self, operation: int) -> RankLost | None:
        """An error if somebody has failed, or has left before the operation that this rank waits for."""
        if self._names("failed"):
            return self.lost("another rank found an operation failing")
        if any(operations < operation for operations, _ in self._left().values()):
            return self.lost("a rank will not take part any more")
        return None

    def lost(self, cause: str) -> RankLost:
        """Answer the roll, hear who else does, and name who does not."""
        try:
            self.store.set(f"failed/{self.rank}", cause)
            self._wait(lambda: not self._silent(), GRACE_S)
            left, silent = self._left(), self._silent()
        except Exception as gone:  # whatever a store client raises when its server has died
            return RankLost(f"the rank that holds the rendezvous store is gone ({gone}); first: {cause}")
        told = [
            f"rank {rank} failed: {reason}" if reason else f"rank {rank} ended its loop early"
            for rank, (_, reason) in left.items()
        ]
        told += [f"rank {rank} is gone or stuck: it does not answer" for rank in silent]
        if any(not reason for _, reason in left.values()):
            told.append("give every rank the same number of batches (for example drop_last=True)")
        return RankLost("; ".join(told or [cause]) + f" (seen by rank {self.rank})")

    def _names(self, kind: str) -> list[int]:
        return [r for r in range(self.world) if r != self.rank and self.store.check([f"{kind}/{r}"])]

    def _left(self) -> dict[int, tuple[int, str]]:
        notes = {rank: self.store.get(f"left/{rank}").decode() for rank in self._names("left")}
        parted = {rank: note.partition(":") for rank, note in notes.items()}
        return {rank: (int(operations), reason) for rank, (operations, _, reason) in parted.items()}

    def _silent(self) -> list[int]:
        heard = {self.rank, *self._names("left"), *self._names("failed")}
        return [rank for rank in range(self.world) if rank not in heard]

    def _wait(self, done: Callable[[], bool], patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True
