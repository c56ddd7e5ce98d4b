"""The transport of a virtual worker: it speaks for one worker, and reads at once."""

from __future__ import annotations

import pytest
import torch

from offbeat import SSP
from offbeat.core.ledger import Ledger
from offbeat.worlds.virtual.computing import Core
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.scheduler import Scheduler
from offbeat.worlds.virtual.server import VirtualServer
from offbeat.worlds.virtual.transport import VirtualTransport
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual


def test_it_reads_all_shards_at_once_and_knows_its_workers_clock() -> None:
    cluster = cluster_of(0.05, 0.05)
    scheduler = Scheduler(Network(cluster))
    half = SSP().server_half()
    assert half is not None
    server = VirtualServer(scheduler, cluster, half, [Ledger(rank, scheduler.clock) for rank in range(2)])
    for rank in range(2):
        server.add_worker(rank, Core(scheduler, rank), ())
    weights = torch.arange(32.0)
    server.open([weights], None)
    transports = [VirtualTransport(rank, server) for rank in range(2)]
    assert [transport.shards for transport in transports] == [2, 2]
    into = torch.zeros(32)
    assert transports[0].read([[into[:16]], [into[16:]]]).done()
    assert torch.equal(into, weights)
    server._joined_clocks[1] = 3
    assert [transport.joined_clock for transport in transports] == [0, 3]
