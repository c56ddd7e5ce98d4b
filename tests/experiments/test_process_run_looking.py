"""While rank 0 evaluates alone, in a run over processes, the others stand still, and nobody's time counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from offbeat import ASP, GSSP, OSP, SSP, DiLoCo
from offbeat.core.ledger import Ledger
from offbeat.experiments import process_run
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.process_run import RunOptions, run_rank
from offbeat.experiments.tasks.base import Data
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.processes.emulation import Emulation
from offbeat.worlds.processes.ledger import SharedLedger
from offbeat.worlds.processes.server.channel import Request
from offbeat.worlds.processes.store import DeadlineStore
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.lost import patched
from tests.support.virtual_runs import AnyStrategy, cluster_of

pytestmark = pytest.mark.processes

STEPS, EVERY = 60, 5


def _store(name: str) -> DeadlineStore:
    return DeadlineStore(dist.PrefixStore(name, _get_default_store()))


@dataclass(frozen=True, kw_only=True)
class Patient(Quadratic):
    """Evaluates, the first time, until the other rank is held; notes the steps of that one meanwhile."""

    name: str = ""
    gained: ClassVar[list[int]] = []

    def evaluate(self, model: nn.Module, data: Data) -> float:
        if not self.gained:
            store = _store(self.name)
            before = store.add("steps", 0)
            assert store.wait(["held"], HANG_S), "the other rank trains on"
            self.gained.append(store.add("steps", 0) - before)
        return super().evaluate(model, data)


class CountSteps(Callback):
    def __init__(self, name: str) -> None:
        self._store = _store(name)

    def stepped(self, step: int, loss: Tensor, worker: Any) -> None:
        self._store.add("steps", 1)


def _held(strategy: AnyStrategy, work: str, patch: pytest.MonkeyPatch) -> Any:
    """Rank 0: the steps of rank 1 during its first look. Rank 1: its waits (blocked, looked), and the sum."""
    rank, name = dist.get_rank(), f"{strategy.name}/{work}"
    waits: list[tuple[float, float]] = []
    ledgers: list[Ledger] = []
    Patient.gained.clear()
    if rank:
        waited = SharedLedger.waited

        class Told(Request):
            def __setattr__(self, field: str, value: Any) -> None:
                super().__setattr__(field, value)
                if field == "waits_for" and value is not None and value[0] == 0:
                    _store(name).set("held", "")  # the shard has said that all wait for rank 0

        def count(ledger: SharedLedger, seconds: float, looked_s: float = 0.0) -> None:
            if not ledger.is_paused:
                waits.append((seconds, looked_s))
                ledgers[:] = [ledger]
            waited(ledger, seconds, looked_s)

        patch.setattr("offbeat.worlds.processes.server.transport.Request", Told)
        patch.setattr(SharedLedger, "waited", count)
    task = Patient(name=name, samples=200, dimension=16)
    job = Job(task=task, strategy=strategy, workers=2, steps=STEPS, evaluate_every=EVERY, work=work)
    options = RunOptions(timeout_s=HANG_S, emulation=Emulation(pace_s=0.002, slow={1: 5.0}))
    process_run.run(job, options, lambda _: [CountSteps(name)] if rank else [])
    return (waits, ledgers[0].wait_s) if rank else Patient.gained[0]


@pytest.mark.parametrize("work", ["equal", "shared"])
@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=3), GSSP()], ids=lambda s: s.name)
def test_no_rank_trains_on_while_rank_0_evaluates(
    strategy: AnyStrategy, work: str, crew: Callable[[int], Crew]
) -> None:
    """It ends the step that it is in and, where a pull overlaps, the next; and waits for nobody."""
    gained, (waits, waited_s) = crew(2).run(patched, _held, strategy, work)
    assert gained <= 2
    assert max(looked_s for _, looked_s in waits) > 0
    assert waited_s == pytest.approx(sum(seconds - looked_s for seconds, looked_s in waits))


def _evaluated(strategy: AnyStrategy, every: int, folder: Path) -> None:
    job = Job(task=Quadratic(dimension=64), strategy=strategy, workers=2, steps=6, evaluate_every=every)
    options = RunOptions(timeout_s=HANG_S)
    run_rank(job, options, folder / str(every), lambda *_: [])


SAME = ["steps", "samples", "sync_steps", "bytes_sent", "staleness", "refused"]


@pytest.mark.parametrize(
    ("strategy", "alike"),
    [(SSP(staleness=0, push="update"), 1), (DiLoCo(on="server", period=2), 6), (OSP(on="server"), 6)],
    ids=["ssp", "diloco", "osp"],
)
def test_ranks_do_the_same_evaluated_at_each_step_or_once_in_both_worlds(
    strategy: AnyStrategy, alike: int, crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    """The order of arrival changes nothing but rounding; under SSP, what rank 0 sees before all have come."""
    for every in (1, 6):
        crew(2).run(_evaluated, strategy, every, tmp_path)
    often, once = (json.loads((tmp_path / str(every) / "summary.json").read_text()) for every in (1, 6))
    for key in SAME:
        assert [w[key] for w in often["per_worker"]] == [w[key] for w in once["per_worker"]], key
    job = Job(task=Quadratic(dimension=64), strategy=strategy, workers=2, steps=6, evaluate_every=1)
    virtual = simulate(job, cluster_of(0.1, 0.1), job.task.load(), lambda _: [])
    values = [point["value"] for point in [*once["history"], *often["history"][-alike:]]]
    expected = [point.value for point in [virtual[-1], *virtual[-alike:]]]
    assert values == pytest.approx(expected, rel=1e-5)
