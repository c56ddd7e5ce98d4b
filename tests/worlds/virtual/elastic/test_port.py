"""The port of a virtual roster: what it refuses, and packets of a roster that has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat import BSP
from offbeat.errors import OffbeatError
from offbeat.worlds.virtual.cluster import Absence
from offbeat.worlds.virtual.elastic.crew import run_elastic_workers
from offbeat.worlds.virtual.elastic.session import ElasticVirtualSession
from offbeat.worlds.virtual.session import autograd
from tests.support.elastic import Bowl
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual


def build(rank: int) -> Any:
    model = Bowl(rank)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


async def talk(session: ElasticVirtualSession) -> Any:
    port = session.port
    await session._scheduler.sleep(2.0)
    with pytest.raises(OffbeatError, match="reduce_scatter cannot be redone"):
        port.reduce_scatter([torch.ones(2)] * port.world)
    packets = [torch.full((2,), float(session.rank)) for _ in range(port.world)]
    gathering = port.all_gather(packets)
    with pytest.raises(OffbeatError, match="cannot block"):
        gathering.wait()
    gathered = await gathering
    return [float(packet[0]) for packet in gathered], gathered is packets, port.world


def test_packets_of_the_dead_are_gone_when_an_exchange_is_redone() -> None:
    death = Absence(worker=1, from_s=1.9)  # known after the others have launched the exchange of three
    cluster = cluster_of(1.0, 1.0, 1.0, away=(death,))
    results = run_elastic_workers(3, cluster, BSP(), build, autograd(lambda model, _: model()), talk)
    assert results == [([0.0, 2.0], True, 2), None, ([0.0, 2.0], True, 2)]
