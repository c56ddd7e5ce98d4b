"""Failure detection: names the rank that is missing when an operation fails.

The ranks talk through the rendezvous store. A rank that leaves writes a note with the reason. When an
operation fails or takes too long, every rank that notices reports the failure; a rank that has neither
reported nor left within a grace period is named as missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import Store

from offbeat.errors import RankLost
from offbeat.worlds.processes.store import TIMEOUT_S, DeadlineStore, wait_for

GRACE_S = 5.0  # for the other ranks to notice the same failure and report it
CHECK_S = 1.0  # between checks that the ranks which are waited for are not somewhere else
CLOSE = "close()"
TOGETHER = "all ranks must call it together, not one under `if rank == 0`"
REPORT_S = 5.0  # for the store to take a report of a failure


class FailureDetector:
    """One rank's record, in the store, of which ranks have left or failed."""

    def __init__(
        self,
        store: Store | DeadlineStore,
        rank: int,
        world: int,
        names: Sequence[int] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.store = DeadlineStore.of(store, timeout_s)
        self.rank = rank
        self.world = world
        self.names = names or range(world)  # as people know the ranks: in a group, by their global numbers
        self._meetings = 0  # of all ranks, so far

    def meet(self, call: str, operations: int, timeout_s: float) -> None:
        """Wait until all ranks are in this `call`, after as many operations; raise an error if one is not.

        Without this, a rank that is alone in a call would be paired with the others' next operation.
        """
        if self.world == 1:
            return
        self._meetings += 1
        # Each rank has a key of its own: a counter could count a rank twice that has to reconnect.
        keys = [f"meeting/{self._meetings}/{call}/{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + timeout_s
        elsewhere = ""
        try:
            self.store.set(f"call/{self.rank}", f"{self._meetings}:{operations}:{call}")
            self.store.set(keys[self.rank], "")
            while not elsewhere and not self.store.wait(keys, CHECK_S):
                elsewhere = self._elsewhere(call, time.monotonic() > deadline)
        except RankLost as error:
            elsewhere = f"the rank that holds the rendezvous store is gone ({error}), while in {call}"
        if elsewhere:
            raise RankLost(elsewhere)

    def _elsewhere(self, call: str, expired: bool) -> str:
        """Return what to say of ranks that do not come to this call; empty: wait on."""
        calls = self._calls()
        absent = [r for r in range(self.world) if r != self.rank and calls.get(r, (0,))[0] < self._meetings]
        in_others = [
            r for r, (number, _, other) in calls.items() if number == self._meetings and other != call
        ]
        lost = [r for r in absent if self.store.check([f"left/{r}"]) or self.store.check([f"failed/{r}"])]
        if in_others:
            other, rank = calls[in_others[0]][2], self.names[in_others[0]]
            return f"rank {self._name} is in {call}, but rank {rank} is in {other}: {TOGETHER}"
        if not lost and not (expired and absent):
            return ""
        named = ", ".join(str(self.names[r]) for r in lost or absent)
        if call == CLOSE:
            return (
                f"rank {self._name} has ended its loop, but rank {named} has not: unless it died, give every "
                "rank the same number of batches (for example drop_last=True)"
            )
        reasons = [self.store.get(f"failed/{r}").decode() for r in lost if self.store.check([f"failed/{r}"])]
        left = {self.names[r]: why for r, (_, why) in self._left().items() if why and r in lost}
        reasons += [f"rank {name} left: {why}" for name, why in left.items()]
        why = f" ({reasons[0]})" if reasons else ""
        return f"rank {self._name} is in {call}, but rank {named} is not: {TOGETHER}{why}"

    def _calls(self) -> dict[int, tuple[int, int, str]]:
        """Return the latest meeting of each rank: its number, the operations before it, and the call."""
        found = {}
        for rank in range(self.world):
            if self.store.check([f"call/{rank}"]):
                number, operations, call = self.store.get(f"call/{rank}").decode().split(":", 2)
                found[rank] = (int(number), int(operations), call)
        return found

    def arrive(self, place: str) -> bool:
        """Record that this rank has come to a place; return whether it is the last of all ranks."""
        self.store.set(f"arrived/{place}/{self.rank}", "")
        if not self.store.check([f"arrived/{place}/{rank}" for rank in range(self.world)]):
            return False
        # Ranks that come at the same time may all see each other: the first to say so counts as the last.
        own = str(self.rank)
        return self.store.compare_set(f"last/{place}", "", own).decode() == own

    def arrived_last(self, place: str) -> int:
        """Return the rank that came last to a place, once all have come."""
        return int(self.store.get(f"last/{place}"))

    def leave(self, operations: int, reason: str) -> None:
        """Record that this rank leaves after this many operations; an empty `reason`: its loop has ended."""
        note = f"{operations}:{reason}"
        if not reason:
            self.store.set(f"left/{self.rank}", note)
            return
        with suppress(RankLost):  # this rank fails already, and its own error says why
            self.store.within(REPORT_S).set(f"left/{self.rank}", note)

    def wait_for_exit(self, patience_s: float) -> None:
        """Wait until all ranks have left, so that none loses a peer or the store during an operation."""
        if not self._all_answer(patience_s) or self._ranks_with("failed"):
            others = [self.names[r] for r in sorted({*self._silent(), *self._ranks_with("failed")})]
            raise RankLost(
                f"rank {self._name} has ended its loop, but rank {', '.join(map(str, others))} has not: "
                "unless it died, give every rank the same number of batches (for example drop_last=True)"
            )
        self.store.set(f"seen/{self.rank}", "")
        if self.rank == 0:  # its process may hold the store, which the other ranks still read
            reading = {rank for rank, (_, reason) in self._left().items() if not reason}
            wait_for(lambda: reading <= {*self._ranks_with("seen")}, patience_s)

    def check(self, operation: int) -> RankLost | None:
        """Return an error if a rank has failed, or has left before taking part in `operation`."""
        try:
            if self._ranks_with("failed"):
                return self.diagnose("an operation failed on another rank")
            for rank, (meeting, operations, call) in self._calls().items():
                if rank != self.rank and meeting > self._meetings and operations < operation:
                    return self._report_lone_rank(rank, call)
            if any(operations < operation for operations, _ in self._left().values()):
                return self.diagnose("a rank left before this operation")
        except RankLost as unreachable:
            return unreachable
        return None

    def _report_lone_rank(self, rank: int, call: str) -> RankLost:
        """Report that another rank is alone in a call while this one exchanges gradients or weights."""
        name = self.names[rank]
        cause = f"rank {name} is in {call} while rank {self._name} trains on: {TOGETHER}"
        if call == CLOSE:
            cause = (
                f"rank {name} ended its loop early, and rank {self._name} trains on: give every rank the "
                "same number of batches (for example drop_last=True)"
            )
        quick = self.store.within(REPORT_S)
        quick.compare_set("first_failure", "", f"rank {self._name}: {cause}")
        quick.set(f"failed/{self.rank}", cause)
        return RankLost(cause)

    def diagnose(self, cause: str) -> RankLost:
        """Report a failure, collect the other ranks' reports, and name the ranks that do not answer."""
        quick = self.store.within(REPORT_S)
        try:
            # Only the first report is stored. It is written before `failed/`, so that a rank which fails
            # because it has seen another rank's `failed/` cannot be the first.
            first = quick.compare_set("first_failure", "", f"rank {self._name}: {cause}").decode()
            quick.set(f"failed/{self.rank}", cause)
            self._all_answer(GRACE_S)
            left, silent = self._left(), self._silent()
        except RankLost as error:
            return RankLost(f"the rank that holds the rendezvous store is gone ({error}); first: {cause}")
        findings = [
            f"rank {self.names[rank]} failed: {reason}"
            if reason
            else f"rank {self.names[rank]} ended its loop early"
            for rank, (_, reason) in left.items()
        ]
        findings += [f"rank {self.names[rank]} is gone or stuck: it does not answer" for rank in silent]
        if any(not reason for _, reason in left.values()):
            findings.append("give every rank the same number of batches (for example drop_last=True)")
        if silent or not findings:
            findings.append(f"the first failure was on {first}")
        return RankLost("; ".join(findings) + f" (seen by rank {self._name})")

    @property
    def _name(self) -> int:
        return self.names[self.rank]

    def _ranks_with(self, kind: str) -> list[int]:
        """Return the other ranks that have an entry of this kind in the store."""
        return [r for r in range(self.world) if r != self.rank and self.store.check([f"{kind}/{r}"])]

    def _left(self) -> dict[int, tuple[int, str]]:
        """Return the operations and the reason of each rank that has left."""
        notes = {rank: self.store.get(f"left/{rank}").decode() for rank in self._ranks_with("left")}
        fields = {rank: note.partition(":") for rank, note in notes.items()}
        return {rank: (int(operations), reason) for rank, (operations, _, reason) in fields.items()}

    def _silent(self) -> list[int]:
        """Return the ranks that have neither left nor reported a failure."""
        heard = {self.rank, *self._ranks_with("left"), *self._ranks_with("failed")}
        return [rank for rank in range(self.world) if rank not in heard]

    def _all_answer(self, patience_s: float) -> bool:
        """Wait until no rank is silent; return whether none is."""
        return wait_for(lambda: not self._silent(), patience_s)


class ExitCount:
    """A count of attached ranks in all groups, so that the one that may hold the store goes last."""

    def __init__(self, store: Store, holds_store: bool) -> None:
        self._store = store
        self._holds_store = holds_store
        store.add("attached", 1)

    def count(self) -> None:
        """Count this rank as gone."""
        self._store.add("gone", 1)

    def wait(self, patience_s: float) -> None:
        """Wait until all ranks are gone, if this rank's process may hold the store."""
        if self._holds_store:
            wait_for(lambda: self._store.add("gone", 0) >= self._store.add("attached", 0), patience_s)
