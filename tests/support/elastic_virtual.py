"""Elastic workers in virtual time, each in a bowl of its own, and a record of all that they committed."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from offbeat.core.ledger import Ledger
from offbeat.errors import RankLost
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.elastic.crew import run_elastic_workers
from offbeat.worlds.virtual.elastic.port import VirtualOperation
from offbeat.worlds.virtual.elastic.session import ElasticVirtualSession
from offbeat.worlds.virtual.session import autograd
from tests.support.elastic import LR, Bowl


class Committed(NamedTuple):
    """An operation, as one worker has its result."""

    epoch: int
    lane: str
    number: int  # among the worker's results of this lane and epoch
    roster: tuple[str, ...]
    operation: str
    checksum: int


class End(NamedTuple):
    """What a worker has at its end."""

    name: str
    joined_at: int
    rosters: list[tuple[str, ...]]  # after each of its steps
    weights: Tensor
    published: Tensor
    momentum: list[float]
    seconds: float


@dataclass
class ElasticRun:
    ends: dict[int, End] = field(default_factory=dict)  # by rank
    ledgers: list[Ledger] = field(default_factory=list)
    committed: dict[str, list[Committed]] = field(default_factory=lambda: defaultdict(list))  # by name
    error: RankLost | None = None

    def rosters(self) -> list[tuple[str, ...]]:
        """Return who took part in each step, as known to a worker that was there all the time."""
        return next(end.rosters for end in self.ends.values() if end.joined_at == 0)


def play_elastic(
    cluster: Cluster, strategy: Any, steps: int, minimum: int = 1, momentum: float = 0.0
) -> ElasticRun:
    """Train on a cluster; with the error in the run if no worker came to the end."""
    run = ElasticRun()
    numbers: Counter[tuple[str, int, str]] = Counter()
    deliver = VirtualOperation._deliver

    def record(operation: Any) -> None:
        port, results = operation._port, operation._results
        name, roster = port.member.name, port.member.roster
        place = (name, roster.epoch, operation._lane.value)
        numbers[place] += 1
        checksum = zlib.crc32(b"".join(result.numpy().tobytes() for result in results))
        run.committed[name].append(
            Committed(*place[1:], numbers[place], roster.everyone, operation._signature.operation, checksum)
        )
        deliver(operation)

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Bowl(rank)
        return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)

    async def train(session: ElasticVirtualSession) -> End:
        joined_at, rosters = session.clock, []
        model: Any = session.model
        while session.clock < steps:
            await session.backward(None, samples=1)
            await session.update()
            rosters.append(session.port.member.roster.everyone)
        own, seconds = model.weights(), session.seconds
        await session.finish()
        published: list[Tensor] = []
        await session.look(lambda totals: published.append(model.weights()), wait=True)
        state = [entry["momentum_buffer"] for entry in session.optimizers[0].state.values() if momentum]
        velocity = torch.cat(state).tolist() if state else []
        return End(session.port.member.name, joined_at, rosters, own, *published, velocity, seconds)

    with mock.patch.object(VirtualOperation, "_deliver", record):
        try:
            ends = run_elastic_workers(
                cluster.size,
                cluster,
                strategy,
                build,
                autograd(lambda model, batch: model()),
                train,
                minimum=minimum,
                on_start=run.ledgers.extend,
            )
        except RankLost as lost:
            run.error = lost
            return run
    run.ends = {rank: end for rank, end in enumerate(ends) if end is not None}
    return run
