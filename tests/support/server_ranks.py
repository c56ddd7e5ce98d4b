"""Ranks that train with a server: exact numbers to resume with, and troubles that befall a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.server.shard_count import PIECES
from tests.conformance.table import AnyStrategy
from tests.support import loops
from tests.support.crew import Crew
from tests.support.limits import HANG_S, SILENCE_S
from tests.support.lost import wait_for_all_but

STEPS, AT = 12, 5
Hire = Callable[[int], Crew]


def server_pid(sync: Any) -> int | None:
    pid: int | None = sync.port.client.transport.server_pid
    return pid


def gone(pid: int) -> bool:
    """Neither running nor a zombie."""
    return not Path(f"/proc/{pid}").exists()


class Exact(nn.Module):
    """Whole numbers and halves of them: whatever is added first, the sum is the same to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9, dtype=torch.float64))

    def forward(self, target: Tensor) -> Tensor:
        return 0.5 * (self.weight - target).square().sum()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, targets: Tensor) -> None:
    for target in targets:
        optimizer.zero_grad()
        model(target).backward()
        optimizer.step()


def exact_run(strategy: AnyStrategy, stop: int | None) -> Tensor:
    """Ten steps, at once or with a stop in between, after which everything is made anew, and goes astray for
    two steps before it is set right."""
    rank, saved = dist.get_rank(), None
    targets = torch.randint(-4, 5, (10, 9), generator=torch.Generator().manual_seed(rank)).double()
    for part in [targets] if stop is None else [targets[:stop], targets[stop:]]:
        model = Exact()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
            if saved is not None:
                fit(model, optimizer, targets[:2])
                sync.load_state_dict(saved)
            fit(model, optimizer, part)
            saved = sync.state_dict()
            with sync.consensus():
                agreed = loops.flat(model)
            own = loops.flat(model)
    return torch.cat([own, agreed])


def exact_run_in_pieces(pieces: int, strategy: AnyStrategy, stop: int | None) -> Tensor:
    """The same, with so many shards on each host; each rank is one, and rank 0's environment counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv(PIECES, str(pieces if dist.get_rank() == 0 else 7))
        return exact_run(strategy, stop)


def troubled_run(
    strategy: AnyStrategy, trouble: str, who: int, patch: pytest.MonkeyPatch
) -> tuple[int, bool, Any]:
    rank, make = dist.get_rank(), ServerSpec.shard_config
    model = loops.mlp()
    optimizer = loops.sgd(model)
    wait_for_all_but(who, patch)
    if trouble == "SIGSTOP":  # the server soon takes one for lost; one who was but slow comes back to it
        patch.setattr(
            ServerSpec, "shard_config", lambda *a, **rest: replace(make(*a, **rest), timeout_s=2 * SILENCE_S)
        )
    sync = offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S)
    pid, keeper = server_pid(sync), sync.port.client.transport._supervisor  # type: ignore[union-attr]

    def strike(step: int) -> None:
        if (rank, step) == (who, AT):
            os.kill(os.getpid(), getattr(signal, trouble))

    loops.train(model, optimizer, loops.batches(rank, STEPS), after_step=strike)  # raises nothing
    assert loops.flat(model).isfinite().all()
    with pytest.raises(offbeat.RankLost) as told:
        sync.close(publish=False)  # to publish, it would wait for the lost rank until the timeout
    nothing_left = keeper is None or (gone(pid) and not Path(keeper._config.snapshot).parent.exists())
    return sync.metrics.steps, nothing_left, str(told.value)
