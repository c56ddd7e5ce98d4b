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


def test_what_all_compute_from_an_exchange_is_computed_once() -> None:
    """Else each of a thousand workers decodes the packets of all."""
    filled: list[int] = []

    async def talk_once(session: ElasticVirtualSession) -> list[float]:
        packets = [torch.full((2,), float(session.rank)) for _ in range(session.port.world)]
        gathering = session.port.all_gather(packets)
        into = torch.zeros(2)

        def fill() -> None:
            filled.append(session.rank)
            torch.sum(torch.stack(packets), 0, out=into)

        await gathering
        gathering.fill_once(into, fill)
        return into.tolist()

    death = Absence(worker=1, from_s=0.0)
    cluster = cluster_of(1.0, 1.0, 1.0, away=(death,))
    results = run_elastic_workers(3, cluster, BSP(), build, autograd(lambda model, _: model()), talk_once)
    assert results == [[2.0, 2.0], None, [2.0, 2.0]]
    assert len(filled) == 1
