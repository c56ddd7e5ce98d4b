"""The elastic session: workers that are not at the same step admit nobody."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import BSP
from offbeat.errors import OffbeatError
from offbeat.worlds.virtual.cluster import Absence
from offbeat.worlds.virtual.elastic.crew import run_elastic_workers
from offbeat.worlds.virtual.elastic.session import ElasticVirtualSession
from offbeat.worlds.virtual.session import autograd
from tests.support.virtual_runs import cluster_of
from tests.worlds.virtual.elastic.test_port import build

pytestmark = pytest.mark.virtual


async def miscount(session: ElasticVirtualSession) -> Any:
    session.ledger.steps += session.rank
    for _ in range(4):
        await session.backward(None, samples=1)
        await session.update()


def test_workers_at_different_steps_are_told_so_when_one_is_to_be_admitted() -> None:
    cluster = cluster_of(1.0, 1.0, 1.0, away=(Absence(worker=2, from_s=0.0, until_s=1.5),))
    with pytest.raises(OffbeatError, match="this worker is at step 3, but rank0000-0 at step 2"):
        run_elastic_workers(3, cluster, BSP(), build, autograd(lambda model, _: model()), miscount)
