"""Process groups of one epoch, on gloo: built under the epoch's own prefix, never shrunk or used again.

A lane's group is built when it is first needed: each costs every worker a connection to every other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.membership import ENTRY, Member
from offbeat.core.port import Lane
from offbeat.core.roster import Roster
from offbeat.worlds.processes.apart import run_apart
from offbeat.worlds.processes.elastic.heartbeat import Heartbeat

PATIENCE_S = 0.1  # seconds to block before checking that the roster is still there
CONNECT_S = 30.0  # for a worker of a roster, which is there, to connect
DROP_S = 1.0  # for a group's destructor at the end
TIMED_OUT = "Timed out waiting"  # gloo's words
NEVER_SENT = (1 << 31) - 2  # the tag of a message that nobody sends


class RosterGroups:
    """The process groups of the current roster, one for each lane."""

    def __init__(self, member: Member, store: dist.Store, heartbeat: Heartbeat, timeout_s: float) -> None:
        self._member = member
        self._store = store
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._groups: dict[Lane, Any] = {}
        self._addresses: list[str] = []  # keys by which the workers of groups find each other
        self._stale_addresses: list[str] = []  # those of the roster before
        self._discarded: list[Thread] = []

    def of(self, lane: Lane) -> Any:
        """Return the lane's group; a roster of one has none."""
        return self._groups.get(lane)

    async def connect(self, roster: Roster) -> bool:
        """Drop all connections and take over the roster; return False if a worker of it cannot be reached."""
        self.disconnect()
        self._heartbeat.watch(roster)
        # Who joins gets the state next, through a group of its own. Otherwise all meet when they vote for the
        # entry.
        return not roster.joining or await self._member.meet(ENTRY)

    def is_open(self, lane: Lane) -> bool:
        """Return whether the lane has its group, or needs none because this worker is alone."""
        return lane in self._groups or self._member.world == 1

    async def open(self, lane: Lane) -> bool:
        """Build the lane's group, as all of the roster do; return False if one of them cannot be reached."""
        if not await self._member.meet(lane.value):  # soon built, where all are there
            return False
        roster = self._member.roster
        group = self.make_group(f"group/{roster.epoch}/{lane.value}", roster.everyone)
        if group is None:
            return False
        self._groups[lane] = group
        return True

    def make_group(self, prefix: str, names: Sequence[str]) -> Any:
        """Connect these workers, of which this is one; None if one of them cannot be reached.

        A group's constructor cannot be interrupted, and may wait for `CONNECT_S` for every worker: where one
        is lost meanwhile, the constructor is left to itself.
        """
        made: Future[Any] = Future()
        place = names.index(self._member.name), len(names)
        run_apart("offbeat-connect", _construct, made, self._store, prefix, *place)
        self._heartbeat.start_waiting()
        while not wait_for([made], PATIENCE_S).done:
            if self._heartbeat.is_broken():
                made.add_done_callback(_close_late)
                return None
        group = made.result()
        if group is not None:  # the group's own limit comes after ours
            group.set_timeout(timedelta(seconds=2 * self._timeout_s + 60))
            rank, world = place  # of gloo's keys, this worker deletes its own and the next one's, who may die
            self._addresses += [f"{prefix}/0/{each % world}" for each in (rank, rank + 1)]
        return group

    def wait(self, work: Any) -> bool:
        """Wait for an operation; return False if it failed, or cannot end because a worker is lost."""
        self._heartbeat.start_waiting()
        while True:
            completed = bool(work.is_completed())
            if not completed and self._heartbeat.is_broken():  # often it is known before the exchange begins
                return False
            try:
                work.wait(timedelta(seconds=PATIENCE_S))
                return True
            except RuntimeError:
                if completed:
                    return False

    def hand_over(self, roster: Roster, makers: list[Callable[[], Tensor]]) -> list[Tensor] | None:
        """Broadcast tensors from the first member to those who join; None if one of them is lost."""
        group = self.make_group(f"handover/{roster.epoch}", (roster.members[0], *roster.joining))
        if group is None:
            return None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        tensors: list[Tensor] = []
        try:
            for make in makers:
                tensors.append(make())
                if not self.wait(group.broadcast([tensors[-1]], options)):
                    return None
            return tensors
        finally:
            held, group = [group], None
            self._discard(held)

    def disconnect(self) -> None:
        """End all operations of the current roster, with or without a result."""
        while self._groups:
            self._discard([self._groups.popitem()[1]])
        # Else the store would grow with every death. Not those of the last roster: a group can be used before
        # the last worker has read them.
        self._heartbeat.stale.extend(self._stale_addresses)
        self._stale_addresses, self._addresses = self._addresses, []

    def _discard(self, held: list[Any]) -> None:
        """Discard the only group in a list apart: gloo takes up to 10 ms for each of its connections.

        Operations of the group may go on for that time, which is why each works on memory of its own.
        """
        self._discarded = [thread for thread in self._discarded if thread.is_alive()]
        self._discarded.append(run_apart("offbeat-discard", discard, held))

    def wait_for_discarded(self) -> None:
        """Wait until the groups of the past are gone; not for one that never comes back."""
        for thread in self._discarded:
            thread.join(DROP_S)


def _construct(made: Future[Any], store: Any, prefix: str, rank: int, world: int) -> None:
    try:
        own = dist.PrefixStore(prefix, store.clone())  # a connection serves one call at a time
        made.set_result(dist.ProcessGroupGloo(own, rank, world, timedelta(seconds=CONNECT_S)))
    except RuntimeError:  # one of them could not be reached
        made.set_result(None)


def _close_late(made: Future[Any]) -> None:
    """Close a group that was built when nobody waited for it any more."""
    if made.result() is not None:
        close_group(made.result())


def discard(held: list[Any]) -> None:
    """Close the only group in a list, and drop it.

    Its destructor waits for all of its operations, and closing does not end every one of them: now and then a
    worker never came back from it, and the others waited for that one. So nobody waits for this.
    """
    close_group(held[0])
    held.clear()


def close_group(group: Any) -> None:
    """Close a group's connections: an operation that waits for a lost worker would keep the group alive.

    Neither `abort` nor `shutdown` of gloo's groups ends such an operation. A wait that times out does: it
    closes all connections of its group. Waiting for a worker that has closed its own fails without that, and
    leaves the others open, so every worker is tried until a wait times out.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            try:
                group.recv([torch.empty(1)], peer, NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError as failed:
                if TIMED_OUT in str(failed):
                    return
