"""Whatever workers die, hang, are cut off or join: nothing is split, counted twice, or decided by too few.

The same code of membership, of redoing exchanges and of handing over as over processes, with real strategies.
`OFFBEAT_SCHEDULES=5000` tries more schedules than the usual ones.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import BSP, OSP, SSDSGD, DiLoCo, ErrorFeedback, LocalSGD, SelSync, TopK
from offbeat.worlds.virtual.cluster import Absence, Cluster, Cut, Hang
from offbeat.worlds.virtual.outages import ElasticTimes
from tests.support.elastic_forms import bsp, periodic
from tests.support.elastic_virtual import Committed, ElasticRun, play_elastic
from tests.support.scripted_auto import ScriptedAuto
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

SCHEDULES = int(os.environ.get("OFFBEAT_SCHEDULES", "70"))
STEPS = 9  # and an average after the last of them
TIMES = ElasticTimes(death_s=0.3, silence_s=1.7, connect_s=0.05)
COMPRESSED = ErrorFeedback(TopK(0.5))
STRATEGIES: list[Any] = [
    BSP(),
    BSP(codec=COMPRESSED),
    LocalSGD(period=3),
    SelSync(delta=0.1, window=2),
    DiLoCo(period=3),
    DiLoCo(period=4, fragments=2, delay=1, outer_lr=1.0, outer_momentum=0.0, mix=0.5),
    DiLoCo(period=3, outer_lr=0.5, outer_momentum=0.3, eager=True),
    OSP(budget=0.5, growth=2),
    SSDSGD(warmup=2, delay=3),
    SSDSGD(rule="authors", warmup=0),
    ScriptedAuto(),
]


@st.composite
def clusters(draw: Any, stable: int = 0) -> Cluster:
    """A cluster of 2 to 5 workers, of which the last `stable` ones are never lost, with a few outages."""
    size = draw(st.integers(max(2, stable + 1), 5))
    pace = draw(st.sampled_from([0.0, 0.13]))  # all workers alike, or each slower than the one before it
    kinds: dict[str, list[Any]] = {"away": [], "hung": [], "cut_off": []}
    for worker in range(size - stable):
        end = 0.0
        for _ in range(draw(st.integers(0, 2))):
            begin = round(end + draw(st.floats(0.0, 6.0)), 3)
            end = round(begin + draw(st.sampled_from([0.4, 1.1, 2.6, 7.0, math.inf])), 3)
            kind = draw(st.sampled_from(sorted(kinds)))
            if kind == "away" and begin == 0 and worker == 0:
                begin = 0.1  # somebody must begin
            many = sorted({worker, draw(st.integers(0, size - stable - 1))}) if kind == "cut_off" else []
            if any(_overlaps(kinds, other, begin, end) for other in many or [worker]):
                break
            who = {"workers": tuple(many)} if many else {"worker": worker}
            table: Any = {"away": Absence, "hung": Hang, "cut_off": Cut}[kind]
            kinds[kind].append(table(**who, from_s=begin, until_s=end))
            if end == math.inf:
                break
    steps = [0.9 + pace * worker for worker in range(size)]
    latency_s = draw(st.sampled_from([0.0, 0.1]))  # exchanges take no time, or as long as a step
    return cluster_of(
        *steps, latency_s=latency_s, elastic=TIMES, **{kind: tuple(found) for kind, found in kinds.items()}
    )


def _overlaps(kinds: dict[str, list[Any]], worker: int, begin: float, end: float) -> bool:
    known = [o for found in kinds.values() for o in found]
    own = [o for o in known if worker in (o.workers if isinstance(o, Cut) else (o.worker,))]
    return any(begin <= o.until_s and o.from_s <= end for o in own)


def check_safety(run: ElasticRun, minimum: int) -> None:
    results: dict[tuple[int, str, int], Committed] = {}
    following: dict[Committed, Committed] = {}
    for name, log in run.committed.items():
        for entry in log:
            same = results.setdefault(entry[:3], entry)
            assert same == entry, f"{name} has another result than others: {entry}, {same}"
            assert name in entry.roster
            assert len(entry.roster) >= minimum, f"too few have decided: {entry}"
        for before, after in pairwise(log):
            other = following.setdefault(before, after)
            assert other == after, f"after {before} one roster went on with {after}, another with {other}"
    ends = list(run.ends.values())
    for end in ends:
        assert end.joined_at + len(end.rosters) == STEPS, "a step was left out, or made twice"
        assert torch.equal(end.published, ends[0].published), "survivors hold different models"
        alike = [other for other in ends if len(other.rosters) >= len(end.rosters)]
        for other in alike:  # all saw the same rosters at the same steps
            assert other.rosters[len(other.rosters) - len(end.rosters) :] == end.rosters


@given(st.sampled_from(STRATEGIES), clusters())
@settings(max_examples=SCHEDULES)
def test_whatever_happens_nothing_is_split_or_counted_twice(strategy: Any, cluster: Cluster) -> None:
    run = play_elastic(cluster, strategy, STEPS, minimum=2)
    check_safety(run, 2)
    assert run.ends or run.error is not None


@given(st.sampled_from(STRATEGIES), clusters(stable=2))
@settings(max_examples=SCHEDULES)
def test_those_who_are_never_lost_come_to_the_end(strategy: Any, cluster: Cluster) -> None:
    """They are a quorum. The others come to the end, too, or are dead, or too late to be admitted."""
    run = play_elastic(cluster, strategy, STEPS, minimum=2)
    check_safety(run, 2)
    for rank in (cluster.size - 2, cluster.size - 1):
        assert run.ends[rank].joined_at == 0
        assert run.ledgers[rank].steps == STEPS


@given(st.sampled_from([BSP(), LocalSGD(period=3), DiLoCo(period=3)]), clusters(stable=1))
@settings(max_examples=SCHEDULES)
def test_each_gradient_counts_once_among_those_who_took_part(strategy: Any, cluster: Cluster) -> None:
    """The weights are those of the closed form, given who took part in each step."""
    run = play_elastic(cluster, strategy, STEPS, minimum=1)
    check_safety(run, 1)
    rosters = run.rosters()
    expected = bsp(rosters) if isinstance(strategy, BSP) else periodic(strategy, rosters)
    last = run.ends[cluster.size - 1]
    torch.testing.assert_close(last.published, expected)
