"""Whatever the cluster and whatever is exchanged: time goes forward, no byte and no worker is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import BSP, LocalSGD, Strategy
from offbeat.core.ledger import CONTROL_BYTES
from offbeat.core.moments import Moment
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.errors import MismatchError, OffbeatError
from offbeat.worlds.virtual.cluster import Absence, Cluster, Site, Slowdown, Workers
from offbeat.worlds.virtual.scheduler import Deadlock
from offbeat.worlds.virtual.step_times import Exponential, Lognormal, Stragglers, Trace
from tests.support.improvised import Improvised, Note
from tests.support.virtual_runs import AnyStrategy, close, cluster_of, keep_spans, play

pytestmark = pytest.mark.virtual


MB = 250_000  # floats

# --- lanes, by hand; two workers at 1 MB/s, 1 s a step


def test_lanes_share_the_links_fairly() -> None:
    """4 MB in the background and 1 MB in front; then 1 MB in front again, and the background is awaited.

    At 1 s both start. At 3 s the front one has come at half speed, at 4 s 2 MB of the background are left
    and the next front one starts, which has come at 6 s; the background goes on alone, until 7 s.
    """
    bars = ((Note(4 * MB, Lane.BACK, held=True), Note(MB)), (Note(MB),))
    run = play(cluster_of(1.0, 1.0), Improvised(bars=bars), 2)
    assert run.seconds == close(7.0)
    assert run.each("wait_s") == [close(5.0)] * 2
    assert run.each("communicate_s") == [close(6.0)] * 2
    assert run.each("bytes_sent") == [6_000_000] * 2


def test_what_fits_behind_the_next_step_costs_nothing() -> None:
    run = play(cluster_of(1.0, 1.0), Improvised(bars=((Note(MB // 2, Lane.BACK, held=True),), ())), 4)
    assert run.seconds == close(4.0)
    assert run.each("wait_s") == [0.0] * 2
    assert run.each("communicate_s") == [close(1.0)] * 2
    assert run.each("sync_steps") == [2] * 2


def test_a_lane_keeps_its_order_and_the_other_overtakes() -> None:
    """3 MB, held, and 1 MB: in one lane the second comes at 1 + 3 + 1 s, in the other at 1 + 2 s."""
    one = play(cluster_of(1.0, 1.0), Improvised(bars=((Note(3 * MB, held=True), Note(MB)), ())), 2)
    assert one.seconds == close(6.0)
    two = play(cluster_of(1.0, 1.0), Improvised(bars=((Note(3 * MB, Lane.BACK, True), Note(MB)), ())), 2)
    assert two.seconds == close(5.0)


def test_what_is_under_way_at_an_evaluation_is_training_and_counts() -> None:
    """As over processes, where `consensus` drains first."""
    run = play(cluster_of(1.0, 3.0), Improvised(bars=((Note(MB, Lane.BACK, held=True),),)), 1)
    assert run.each("bytes_sent") == [1_000_000] * 2
    assert [ledger.seconds for ledger in run.ledgers] == [close(4.0)] * 2
    assert run.each("wait_s") == [close(3.0), close(1.0)]
    assert run.each("communicate_s") == [close(3.0), close(1.0)]


def test_an_operation_counts_for_the_step_that_started_it() -> None:
    """Worker 0 is a step ahead when worker 1 comes, and only then anything moves."""
    bars = ((Note(16, Lane.BACK, held=True),), (Note(16),))  # 64 bytes: less would be control traffic
    run = play(cluster_of(1.0, 1.5), Improvised(bars=bars), 2)
    assert run.each("sync_steps") == [2, 2]


# --- evaluation is not training


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=3)], ids=str)
@pytest.mark.parametrize("step_s", [(1.0, 1.0), (1.0, 2.5)], ids=["equal", "unequal"])
def test_evaluation_costs_nothing(strategy: AnyStrategy, step_s: tuple[float, ...]) -> None:
    cluster = cluster_of(*step_s)
    often, once = (play(cluster, strategy, 6, evaluate_every=n, prepare=keep_spans) for n in (1, 100))
    assert often.history[-1].value == once.history[-1].value
    assert all(map(torch.equal, often.weights, once.weights))
    assert often.each("bytes_sent") == once.each("bytes_sent")
    assert often.each("sync_steps") == once.each("sync_steps")
    assert often.seconds == close(once.seconds)
    for what in ("compute_s", "wait_s", "communicate_s"):
        assert often.each(what) == [close(seconds) for seconds in once.each(what)]
    steps = [[s for s in run.ledgers[0].spans or [] if s.kind == "step"] for run in (often, once)]
    lengths = [[s.end_s - s.start_s for s in spans] for spans in steps]
    assert lengths[0] == [close(seconds) for seconds in lengths[1]]


# --- any cluster, any exchange

seconds = st.sampled_from([0.001, 0.01, 0.3])
step_times = st.one_of(
    seconds,
    st.builds(Lognormal, median_s=seconds, sigma=st.just(0.8)),
    st.builds(Exponential, least_s=seconds, tail_s=seconds),
    st.builds(Stragglers, usual_s=seconds, probability=st.just(0.3), factor=st.just(7.0)),
    st.builds(Trace, trace_s=st.tuples(seconds, seconds)),
)
rates = st.sampled_from([1e5, 1e6, 3e7])
groups = st.builds(
    Workers,
    step_s=step_times,
    up_bits_per_s=rates,
    down_bits_per_s=rates,
    latency_s=st.sampled_from([0.0, 1e-4]),
    count=st.integers(1, 2),
    site=st.sampled_from(["", "here", "there"]),
)
sites = [Site(name="here", up_bits_per_s=5e5, latency_s=0.02), Site(name="there", latency_s=0.01)]
clusters = st.builds(
    Cluster,
    workers=st.lists(groups, min_size=1, max_size=3).map(tuple),
    sites=st.just(tuple(sites)),
    slow=st.sampled_from([(), (Slowdown(workers=(0,), from_s=0.02, until_s=0.5, factor=6),)]),
    away=st.sampled_from([(), (Absence(worker=0, from_s=0.01, until_s=0.2),)]),
    operation_s=st.sampled_from([0.0, 2e-4]),
    update_share=st.sampled_from([0.0, 0.1]),
)
notes = st.builds(Note, st.sampled_from([1, 7, 1000, 30_001]), st.sampled_from(Lane), st.booleans())
bars = st.lists(st.lists(notes, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple)
STEPS = 5


@settings(max_examples=200, deadline=None)
@given(clusters, bars)
def test_time_goes_forward_and_nothing_is_lost(cluster: Cluster, bars: tuple[tuple[Note, ...], ...]) -> None:
    computed = dict.fromkeys(range(cluster.size), 0.0)
    step_seconds = Cluster.step_seconds

    def noted(self: Cluster, worker: int, *rest: Any) -> float:
        took = step_seconds(self, worker, *rest)
        computed[worker] += took
        return took

    with patch.object(Cluster, "step_seconds", noted):
        run = play(cluster, Improvised(bars=bars), STEPS, prepare=keep_spans)
    played = [bars[step % len(bars)] for step in range(STEPS)]
    exchanged = sum(note.numel * 4 for bar in played for note in bar)
    carried = [any(4 * note.numel >= CONTROL_BYTES for note in bar) for bar in played]
    synced = sum(carried) if cluster.size > 1 else 0
    assert sum(run.each("bytes_sent")) == 2 * (cluster.size - 1) * exchanged, "ring or tree alike"
    for rank, ledger in enumerate(run.ledgers):
        entry = ledger.totals()
        assert (entry.steps, entry.sync_steps) == (STEPS, synced)
        assert 0 <= entry.wait_s == close(ledger.seconds - entry.compute_s)
        away_s = sum(spell.until_s - spell.from_s for spell in cluster.absences(rank))
        assert computed[rank] * (1 - 1e-9) <= entry.compute_s <= (computed[rank] + away_s) * (1 + 1e-9)
        assert entry.communicate_s <= ledger.seconds * (1 + 1e-9)
        spans = ledger.spans or []
        assert all(span.start_s <= span.end_s for span in spans)
        in_time = [span for span in spans if span.kind != "forward"]  # which is known when backward has ended
        assert all(one.end_s <= next_.end_s for one, next_ in pairwise(in_time)), "written as time goes by"
        steps = [span for span in spans if span.kind == "step"]
        assert all(one.end_s <= next_.start_s for one, next_ in pairwise(steps))


# --- what can never end is told


def test_one_who_left_is_named() -> None:
    with pytest.raises(Deadlock) as told:
        play(cluster_of(1.0, 1.0, 1.0, away=(Absence(worker=2, from_s=1.5),)), BSP(), 5)
    assert "worker 2 waits for nothing: it left for good at 1.5 s" in str(told.value)
    for rank in (0, 1):
        assert f"worker {rank} waits for operation" in str(told.value)
    assert "which worker 2 has not joined" in str(told.value)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ((), ["all_reduce sum of 40 bytes"]),
        ((Note(10, Lane.BACK),), ["on lane front", "on lane back", "which worker 0, 2 has not joined"]),
        ((Note(11),), ["all_reduce sum of 40 bytes", "all_reduce sum of 44 bytes"]),
        ((Note(10), Note(10)), ["all_reduce sum of 40 bytes"]),
    ],
    ids=["skipped", "another lane", "another size", "one more"],
)
def test_one_who_plays_something_else_is_named(theirs: tuple[Note, ...], words: list[str]) -> None:
    with pytest.raises((Deadlock, MismatchError)) as told:
        play(cluster_of(1.0, 1.0, 1.0), Improvised(bars=((Note(10),),), others={1: (theirs,)}), 3)
    assert all(word in str(told.value) for word in ["worker 1", "worker 0", *words]), told.value


def test_many_who_wait_are_counted() -> None:
    with pytest.raises(OffbeatError, match=r"stuck at 2\.0\d+ s: .*; and 4 more"):
        play(cluster_of(*[1.0] * 12, away=(Absence(worker=3, from_s=0.5),)), BSP(), 5)


@dataclass(frozen=True, kw_only=True)
class Wrong(Strategy[None]):
    name = "wrong"
    summary = "does what no strategy may"

    wrong: str

    def init(self, replica: Replica) -> None:
        return None

    async def step(self, state: None, replica: Replica, port: Port) -> None:
        deeds: dict[str, Callable[[], object]] = {
            "block": lambda: port.all_reduce(torch.zeros(1)).wait(),
            "block on the loop": lambda: replica.update().wait(),
        }
        if self.wrong in deeds:
            deeds[self.wrong]()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("sleep", r"may await only a Pending that a port or a replica returned, not a NoneType"),
        ("block", "in virtual time a strategy cannot block on a result: await it"),
        ("block on the loop", "only the training loop can fire the moment"),
    ],
)
def test_what_no_world_can_bring_is_refused_at_once(wrong: str, told: str) -> None:
    with pytest.raises(OffbeatError, match=told):
        play(cluster_of(1.0, 1.0), Wrong(wrong=wrong), 5)


class Foreign(Moment):
    """Pending, but of no world that anybody knows."""


@dataclass(frozen=True, kw_only=True)
class Misled(Wrong):
    name = "misled"

    async def drain(self, state: None, replica: Replica, port: Port) -> None:
        await Foreign("the end of time")

    async def step(self, state: None, replica: Replica, port: Port) -> None:
        await replica.update()


def test_what_is_not_of_this_world_is_refused_at_once() -> None:
    with pytest.raises(
        OffbeatError, match="worker 0 awaits a Foreign, which does not belong to virtual time"
    ):
        play(cluster_of(1.0, 1.0), Misled(wrong=""), 1)
