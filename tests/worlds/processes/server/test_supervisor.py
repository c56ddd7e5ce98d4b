"""A shard's process dies in mid-training: it is started again, workers come back, what is lost is named.

Updates are whole numbers: each push adds 1 to every weight, so the weights tell how many pushes they hold.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import offbeat
from offbeat import ASP, SSP
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server import bootstrap as enrolment
from offbeat.worlds.processes.server import supervisor as keeper
from offbeat.worlds.processes.server.snapshots import Snapshots
from tests.conformance.table import AnyStrategy
from tests.support.counting import Counting, count_on, counted, counting_optimizer
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.waiting import until

pytestmark = pytest.mark.processes

STEPS, AT = 12, 6


def kept(path: Path) -> ShardState:
    memory = until(lambda: Snapshots(path, 1.0).read())
    assert isinstance(memory, ShardState)
    return memory


@contextmanager
def said_into(path: Path) -> Iterator[None]:
    """What this process and those that it starts write to stderr."""
    before, file = os.dup(2), path.open("w")
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        file.close()


# --- blows


def kill(links: Any) -> None:
    os.kill(links.server_pid, signal.SIGKILL)


def abort(links: Any) -> None:
    """As a library in the shard's process would that finds its memory in disorder."""
    os.kill(links.server_pid, signal.SIGABRT)


def _struck(strategy: AnyStrategy, blow: Callable[[Any], None], folder: Path) -> tuple[int, int, int, Any]:
    """Rank 0 strikes its shard. What the weights count in the end, what of rank 0 was kept when it struck,
    and the clock that this rank's way has in the end."""
    rank = dist.get_rank()
    model = Counting(dist.get_world_size())
    optimizer = counting_optimizer(model)
    held = 0

    def strike(links: Any) -> int:
        path, pid = Path(links._supervisor._config.snapshot), links.server_pid
        until(lambda: kept(path).applied[0] >= AT - 2)
        applied = kept(path).applied[0]
        blow(links)
        until(lambda: links.server_pid != pid)
        return applied

    with pytest.MonkeyPatch.context() as patch, said_into(folder / f"rank-{rank}"):
        patch.setattr(keeper, "QUICKLY_S", 0.0)
        patch.setattr(enrolment, "SNAPSHOT_S", 0.05)
        with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
            links: Any = sync.port.client.transport
            for step in range(1, STEPS + 1):
                count_on(model, optimizer)
                if step == AT:
                    held = strike(links) if rank == 0 else 0
                    dist.barrier()  # so that both ranks push to the new process, which says what is lost
            sync.settle()
            with sync.consensus():
                total = counted(model)
            return total, held, links.channels[0].clock, sync.metrics


@pytest.mark.parametrize(
    ("strategy", "blow"),
    [(SSP(staleness=1), kill), (ASP(overlap=False), abort)],
    ids=["ssp-killed", "asp-aborts"],
)
def test_training_goes_on_when_a_shard_dies(
    crew: Callable[[int], Crew], tmp_path: Path, strategy: AnyStrategy, blow: Callable[[Any], None]
) -> None:
    (total, held, clock, metrics), (there, _, _, metrics_there) = crew(2).run(
        _struck, strategy, blow, tmp_path
    )
    said = (tmp_path / "rank-0").read_text()
    assert "died (exit code -" in said and "starts again from its snapshot" in said
    lost = {int(w): int(n) for n, w in re.findall(r"(\d+) updates of worker (\d) since .* are lost", said)}
    assert (metrics.steps, metrics_there.steps, clock) == (STEPS, STEPS, STEPS)
    assert total == there == 2 * STEPS - sum(lost.values()), "nothing else is missing, nothing is there twice"
    assert lost.get(0, 0) <= AT - held, "what was kept is there"
    if isinstance(strategy, SSP):
        assert max(metrics.staleness_max, metrics_there.staleness_max) <= 1


def _struck_early(idle: bool) -> str:
    """There is no snapshot when the shard dies; `idle`: rank 1 has had no answer by then."""
    model = Counting(dist.get_world_size())
    optimizer = counting_optimizer(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "QUICKLY_S", 0.0)
        sync = offbeat.attach(model, optimizer, ASP(overlap=False), timeout_s=HANG_S)
        store = dist.PrefixStore(f"struck_early/{idle}", _get_default_store())
        if idle and dist.get_rank() == 1:
            store.wait(["now"], timedelta(seconds=HANG_S))
        with pytest.raises(offbeat.RankLost) as told:
            for step in count(1):
                count_on(model, optimizer)
                if dist.get_rank() == 0 and step == 1:
                    path = Path(sync.port.client.transport._supervisor._config.snapshot)  # type: ignore[union-attr]
                    until(path.exists)
                    path.unlink()
                    kill(sync.port.client.transport)
                    store.set("now", "")
        sync.close(told.value)
    return str(told.value)


@pytest.mark.parametrize("idle", [False, True])
def test_without_a_snapshot_the_weights_are_lost_and_all_are_told(
    crew: Callable[[int], Crew], idle: bool
) -> None:
    told = crew(2).run(_struck_early, idle)
    wanted = (
        "the parameter server's shard beside rank 0 crashed before it had a snapshot: its weights are lost"
    )
    assert told == [wanted] * 2


def _fails_at_once() -> str:
    model = Counting(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "command", lambda config: [sys.executable, "-c", "raise SystemExit(7)"])
        with pytest.raises(offbeat.RankLost) as told:
            offbeat.attach(model, counting_optimizer(model), ASP(overlap=False), timeout_s=HANG_S)
    return str(told.value)


def test_shard_that_cannot_start_is_told_at_once_on_all_ranks(crew: Callable[[int], Crew]) -> None:
    told = crew(2).run(_fails_at_once)
    wanted = "its process failed with exit code 7, and would fail again"
    assert all(wanted in text and "shard beside rank 0" in text for text in told), told
