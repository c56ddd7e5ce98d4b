"""A worker's port in virtual time: its lanes, its ledger and its server."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane, Op, Port
from offbeat.errors import OffbeatError
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.port import VirtualPort
from offbeat.worlds.virtual.scheduler import Scheduler
from tests.support.exchanges import equal_workers, virtually

pytestmark = pytest.mark.virtual


def ports(world: int) -> list[VirtualPort]:
    scheduler = Scheduler(Network(equal_workers(world)))
    ledgers = [Ledger(rank, scheduler.clock) for rank in range(world)]
    lanes = {lane: CollectiveQueue(lane, scheduler, ledgers, world) for lane in Lane}
    return [VirtualPort(rank, lanes, ledgers[rank]) for rank in range(world)]


def test_a_port_knows_its_worker() -> None:
    first, second = ports(2)
    assert [(port.rank, port.world, port.ledger.rank) for port in (first, second)] == [(0, 2, 0), (1, 2, 1)]
    second.record(planned_steps=4)
    assert (first.ledger.totals().planned_steps, second.ledger.totals().planned_steps) == (0, 4)
    assert second.usage() == second.ledger.usage()


def test_a_server_is_the_one_that_was_connected() -> None:
    first, second = ports(2)
    client = object()
    first.connect(client)  # type: ignore[arg-type]
    assert first.server is client
    with pytest.raises(OffbeatError, match="server"):
        _ = second.server


async def _both_lanes(port: Port) -> list[Tensor]:
    """4 MB at the back and 4 MB in front, on links of 1 MB/s, started in another order by each worker."""
    operations = [(Op.SUM, Lane.BACK), (Op.MAX, Lane.FRONT)]
    started = {}
    for op, lane in operations if port.rank else reversed(operations):
        started[lane] = port.all_reduce(torch.full((1_000_000,), port.rank + 1.0), op, lane)
    return [(await started[lane])[:2] for lane in (Lane.FRONT, Lane.BACK)]


def test_operations_take_the_time_of_their_bytes_on_lanes_of_their_own() -> None:
    for (front, back), totals in virtually(_both_lanes, equal_workers(2)):
        assert (front.tolist(), back.tolist()) == ([2.0, 2.0], [3.0, 3.0])
        assert totals.bytes_sent == 8_000_000
        assert totals.wait_s == pytest.approx(8.0)
