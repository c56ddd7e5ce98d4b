"""Networks of the virtual world, and an event loop that runs their transfers to the end."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.worlds.virtual.cluster import Cluster, Workers
from offbeat.worlds.virtual.flow import FlowNetwork, Transfer
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.queues import Queues

MB = 1_000_000


def close(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-9)


def workers(count: int, mbytes_per_s: float = 100, latency_s: float = 0.0, site: str = "") -> Workers:
    bits = mbytes_per_s * 8e6
    return Workers(
        step_s=0.1, up_bits_per_s=bits, down_bits_per_s=bits, latency_s=latency_s, count=count, site=site
    )


def network_of(*groups: Workers, **rest: Any) -> Network:
    return Network(Cluster(workers=groups, **rest))


def arrivals(network: FlowNetwork | Queues, *starts: tuple[float, Transfer]) -> dict[Transfer, float]:
    """Run everything to its end, as an event loop would; the starts come in order of time."""
    waiting = list(starts)
    arrived: dict[Transfer, float] = {}
    while True:
        event = network.next_event()
        if waiting and (event is None or waiting[0][0] <= event):
            network.start(*waiting.pop(0))
        elif event is not None:
            for transfer in network.advance(event):
                assert isinstance(transfer, Transfer)
                arrived[transfer] = event
        else:
            return arrived
