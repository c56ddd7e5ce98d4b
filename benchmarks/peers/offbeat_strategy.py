"""Strategies of Offbeat, attached to the loop that all contenders share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

import offbeat
from benchmarks.peers.training import RankSetup, Training
from offbeat.core.settings import build
from offbeat.experiments.tasks import Batch
from offbeat.strategies import STRATEGIES

TIMEOUT_S = 120.0
MUON_LR = 1e-3  # of AdamW, too


@contextmanager
def attached(setup: RankSetup, optimizers: Sequence[Optimizer] = ()) -> Iterator[Training]:
    """Train with the strategy named in the settings; by default with the task's own optimizer."""
    optimizers = optimizers or [setup.optimizer]
    settings = dict(setup.settings)
    strategy = build(STRATEGIES[settings.pop("strategy")], settings)
    served = strategy.server_half() is not None
    with offbeat.attach(setup.model, list(optimizers), strategy, timeout_s=TIMEOUT_S) as sync:

        def step(batch: Batch) -> None:
            sync.samples(len(batch[0]))
            setup.step(setup.model, optimizers, batch)

        yield Training(
            step=step,
            global_model=lambda: sync.consensus(alone=served),
            wait_pending=sync.settle,  # which consensus() does not
            # close() leaves the server only when all ranks call it; with bounded staleness some would block
            leave=lambda: sync.port.client and sync.port.client.leave(),
            independent=served,
        )


def attached_with_muon(setup: RankSetup) -> AbstractContextManager[Training]:
    """Train as MuLoCo does, with Muon inside, at the settings of docs/strategies/diloco.md."""
    matrices = hidden_matrices(setup.model)
    chosen = set(matrices)
    others = [param for param in setup.model.parameters() if param not in chosen]
    muon = torch.optim.Muon(matrices, lr=MUON_LR, adjust_lr_fn="match_rms_adamw")
    return attached(setup, [muon, torch.optim.AdamW(others, lr=MUON_LR)])


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices between input and output: not the last one, nor one that an embedding shares."""
    embedded = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = [param for param in model.parameters() if param.ndim == 2 and param not in embedded]
    return matrices if embedded else matrices[:-1]
