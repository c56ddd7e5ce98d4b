"""Strategies of Offbeat, attached to the loop that all contenders share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import offbeat
from benchmarks.peers.training import RankSetup, Training
from offbeat.core.settings import build
from offbeat.experiments.tasks import Batch
from offbeat.strategies import STRATEGIES

TIMEOUT_S = 120.0


@contextmanager
def attached(setup: RankSetup) -> Iterator[Training]:
    """Train with the strategy named in the settings."""
    settings = dict(setup.settings)
    strategy = build(STRATEGIES[settings.pop("strategy")], settings)
    served = strategy.server_half() is not None
    with offbeat.attach(setup.model, setup.optimizer, strategy, timeout_s=TIMEOUT_S) as sync:

        def step(batch: Batch) -> None:
            sync.samples(len(batch[0]))
            setup.step(setup.model, setup.optimizer, batch)

        yield Training(
            step=step,
            global_model=lambda: sync.consensus(alone=served),
            wait_pending=sync.settle,  # which consensus() does not
            # close() leaves the server only when all ranks call it; with bounded staleness some would block
            leave=lambda: sync.port.client and sync.port.client.leave(),
            independent=served,
        )
