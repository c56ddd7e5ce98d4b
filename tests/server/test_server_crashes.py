"""Whatever comes, and whenever the server crashes: nothing counts twice, and nothing is lost unsaid."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import SSP
from offbeat.server.messages import Join, JoinAck, Leave, Pull, PullReply, Push, PushAck
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState

Server = ParameterServer


acts = st.sampled_from(["push"] * 4 + ["pull"] * 4 + ["leave", "mend", "fence", "crash", "snapshot"])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2), st.booleans(), st.lists(st.tuples(st.integers(0, 2), acts, acts), max_size=70))
def test_no_update_is_folded_twice_and_none_is_missing_but_those_reported_lost(
    staleness: int, overlap: bool, schedule: list[tuple[int, str, str]]
) -> None:
    """Worker w's push of clock c adds 1 to element 100 w + c: integers, so sums are exact.

    Links break and the server crashes at any moment; a worker then comes back with the clock that was
    acknowledged, and sends again what was under way, as `Way` does.
    """
    ahead = int(overlap and staleness > 0)
    kept = ShardState([torch.zeros(300)])
    server: Server = ParameterServer(copied(kept), SSP(staleness=staleness).server_half())
    clocks: dict[int, int] = {}  # of those who are here: acknowledged
    unanswered: dict[int, list[Push | Pull]] = {}  # what each has sent, in order
    to_ask: set[int] = set()  # those who have pushed, and not pulled yet
    born: dict[int, int] = {}  # the clock that a worker began with
    lost: set[tuple[int, int]] = set()

    def handle(message: Any) -> None:
        for answer in server.handle(message):
            worker = answer.worker
            match answer:
                case JoinAck(clock=clock):
                    clocks[worker] = clock
                    lost.update((worker, c) for c in range(clock - answer.lost + 1, clock + 1))
                case PushAck(clock=clock):
                    clocks[worker] = max(clocks[worker], clock)
                    unanswered[worker] = unanswered[worker][1:]
                case PullReply():
                    (asked,) = unanswered.pop(worker)
                    assert isinstance(asked, Pull)
                    assert answer.staleness == max(0, asked.clock - min(counted().values())) <= staleness
                    own = range(born[worker] + 1, clocks[worker] + 1)
                    assert all(held(worker, c) for c in own if (worker, c) not in lost), "its own are there"

    def counted() -> dict[int, int]:
        return server.state.of  # type: ignore[no-any-return]

    def held(worker: int, clock: int) -> int:
        return int(server.weights[0][100 * worker + clock])

    def back(worker: int, fenced: bool = False) -> None:
        before, kept = clocks[worker], server.shard.applied.get(worker, 0)
        handle(Join(worker=worker, clock=before, fenced=fenced))
        if fenced and clocks[worker] > before:  # the clocks between are skipped, and pushes at them dropped
            lost.update((worker, c) for c in range(max(before, kept) + 1, clocks[worker] + 1))
        for message in list(unanswered.get(worker, [])):
            handle(message)

    for worker, act, fate in schedule:
        if act == "snapshot":
            kept = copied(server.shard)
        elif act == "crash":
            server = ParameterServer(copied(kept), SSP(staleness=staleness).server_half())
            for each in list(clocks):
                back(each)
        elif worker not in clocks:
            if worker not in born:
                handle(Join(worker=worker))
                born[worker] = clocks[worker]
        elif act == "leave":
            del clocks[worker]
            unanswered.pop(worker, None)
            to_ask.discard(worker)
            handle(Leave(worker=worker))
        elif act in ("mend", "fence"):
            back(worker, fenced=act == "fence")
        elif act == "push" and worker not in unanswered and worker not in to_ask:
            clock = clocks[worker] + 1
            update = torch.zeros(300)
            update[100 * worker + clock] = 1
            unanswered[worker] = [Push(worker=worker, clock=clock, update=[update])]
            to_ask.add(worker)
            if fate == "mend":  # it is taken, but the receipt is lost with the link
                server.handle(unanswered[worker][0])
                back(worker)
            else:
                handle(unanswered[worker][0])
        elif act == "pull" and worker in to_ask:
            to_ask.remove(worker)
            unanswered[worker].append(Pull(worker=worker, clock=clocks[worker] + ahead))
            handle(unanswered[worker][-1])
        assert set(counted()) == set(clocks)
        slowest = min(counted().values(), default=0)
        waiting = unanswered.keys() - to_ask
        assert not any(counted()[w] == slowest for w in waiting), "nobody waits for one who left"
        for each, clock in clocks.items():
            for c in range(born[each] + 1, clock + 1):
                assert held(each, c) == ((each, c) not in lost), "exactly once, or reported lost"
        assert server.weights[0].max() <= 1, "nothing twice, of those who left either"


def copied(memory: ShardState) -> ShardState:
    return ShardState([weight.clone() for weight in memory.weights], dict(memory.applied))
