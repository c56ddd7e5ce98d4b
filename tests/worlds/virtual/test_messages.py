"""Messages of a worker to a virtual server: together they take the time that each would take alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from offbeat import ASP, DSSP, GSSP, OSP, SSP, Oscars, TopK
from offbeat.worlds.virtual.cluster import Absence, Cluster, ServerMachines, load_cluster
from offbeat.worlds.virtual.network import Paths
from offbeat.worlds.virtual.scheduler import Parts, Scheduler
from tests.support.virtual_runs import AnyStrategy, Kept, Run, keep_spans, play

pytestmark = pytest.mark.virtual

STRATEGIES = [ASP(), SSP(staleness=1, codec=TopK(0.3)), DSSP(), GSSP(window=2), Oscars(), OSP(on="server")]


def away(cluster: Cluster) -> Cluster:
    return replace(cluster, away=(Absence(worker=1, from_s=0.06, until_s=0.3),))


def clusters() -> Iterator[Any]:
    dedicated = ServerMachines(up_bits_per_s=2e9, down_bits_per_s=1e9, latency_s=2e-4, count=3)
    stragglers = load_cluster("stragglers").for_workers(18)  # two of them without a shard
    yield pytest.param(stragglers, id="stragglers")
    yield pytest.param(load_cluster("wan").for_workers(5), id="wan")
    yield pytest.param(replace(stragglers.for_workers(5), server=dedicated), id="dedicated")
    yield pytest.param(away(stragglers.for_workers(4)), id="away")


def each_by_itself(
    send: Any, self: Scheduler, paths: Paths, sizes: tuple[int, ...], left: Parts, arrived: Parts
) -> None:
    for part, (path, nbytes) in enumerate(zip(paths, sizes, strict=True)):
        send(
            self,
            (path,),
            (nbytes,),
            lambda _, part=part: left([part]),
            lambda _, part=part: arrived([part]),
        )


def run_of(cluster: Cluster, strategy: AnyStrategy) -> Run:
    return play(cluster, strategy, 4, task=Kept(dimension=90), evaluate_every=3, prepare=keep_spans)


CASES = [
    pytest.param(cluster.values[0], strategy, id=f"{cluster.id}-{strategy}")
    for cluster in clusters()
    for strategy in STRATEGIES
    if cluster.id != "away" or strategy.name != "osp"  # whose server has no weights for one who comes back
]


@pytest.mark.parametrize(("cluster", "strategy"), CASES)
def test_messages_sent_together_are_as_if_sent_one_by_one(
    cluster: Cluster, strategy: AnyStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds, bytes, timelines and weights, to the bit."""
    together = run_of(cluster, strategy)
    send = Scheduler.send
    monkeypatch.setattr(Scheduler, "send", lambda self, *rest: each_by_itself(send, self, *rest))
    alone = run_of(cluster, strategy)
    assert together.history == alone.history
    assert [one.totals() for one in together.ledgers] == [one.totals() for one in alone.ledgers]
    assert [one.spans for one in together.ledgers] == [one.spans for one in alone.ledgers]
    assert all(map(torch.equal, together.weights, alone.weights))
