"""Every strategy here, by the same one line in the same loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import offbeat
from benchmarks.peers.training import Bench, Training
from offbeat.core.settings import build
from offbeat.experiments.tasks import Batch
from offbeat.strategies import STRATEGIES

TIMEOUT_S = 120.0


@contextmanager
def attached(bench: Bench) -> Iterator[Training]:
    settings = dict(bench.settings)
    strategy = build(STRATEGIES[settings.pop("strategy")], settings)
    served = strategy.server_half() is not None
    with offbeat.attach(bench.model, bench.optimizer, strategy, timeout_s=TIMEOUT_S) as sync:

        def step(batch: Batch) -> None:
            sync.samples(len(batch[0]))
            bench.step(bench.model, bench.optimizer, batch)

        yield Training(
            step=step,
            looking=lambda: sync.consensus(alone=served),
            settle=sync.settle,  # consensus() does it too, out of the clock
            # close() leaves the server only when all have come to it: with a bound some never would
            leave=lambda: sync.port.client and sync.port.client.leave(),
            alone=served,
        )
