"""Looking is free for elastic workers in virtual time, too: it finds no death, and lets no newcomer in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from offbeat.core.elastic import check_elastic
from offbeat.core.ledger import Ledger
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Absence, Cluster, Hang
from offbeat.worlds.virtual.outages import ElasticTimes
from tests.conformance.table import TABLE, AnyStrategy
from tests.conformance.test_looking import COUNTED, EQUAL, UNEQUAL, Net
from tests.support.loops import flat

pytestmark = pytest.mark.virtual

STEPS = 12
MINIMUM = 2  # of three: codecs need two
OUTAGES: dict[str, dict[str, tuple[Absence | Hang, ...]]] = {
    "no death": {},
    "a death": {"away": (Absence(worker=1, from_s=0.021),)},
    "the first dies and returns": {"away": (Absence(worker=0, from_s=0.021, until_s=0.03),)},
    "one hangs and is dropped": {"hung": (Hang(worker=2, from_s=0.021, until_s=0.4),)},
}


def is_elastic(strategy: AnyStrategy) -> bool:
    try:
        check_elastic(strategy, MINIMUM)
    except SettingError:
        return False
    return True


ELASTIC = [case.strategy for case in TABLE if is_elastic(case.strategy)]


@dataclass
class Looked:
    """A run, with all that looking at it must not change."""

    history: list[Evaluation]
    ledgers: Sequence[Ledger]
    weights: list[Tensor]
    seen: list[Tensor]

    @property
    def counted(self) -> dict[str, list[float]]:
        what = [*COUNTED, "samples", "rosters", "lost_steps", "lost_s"]
        totals = [ledger.totals() for ledger in self.ledgers]
        return {name: [getattr(each, name) for each in totals] for name in what}


def look_every(steps: int, strategy: AnyStrategy, cluster: Cluster) -> Looked:
    task, ledgers = Net(), list[Ledger]()
    job = Job(task=task, strategy=strategy, workers=3, steps=STEPS, evaluate_every=steps)

    def keep(of_run: list[Ledger]) -> list[None]:
        ledgers.extend(of_run)
        return []

    history = simulate(job, cluster, task.load(), keep, minimum=MINIMUM)  # type: ignore[arg-type]
    return Looked(history, ledgers, [flat(model) for model in task.built], task.seen)


@pytest.mark.parametrize("outages", OUTAGES)
@pytest.mark.parametrize("cluster", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("strategy", ELASTIC, ids=str)
def test_a_run_is_the_same_however_often_it_is_evaluated(
    strategy: AnyStrategy, cluster: Cluster, outages: str
) -> None:
    short = ElasticTimes(silence_s=0.1)
    cluster = replace(cluster, elastic=short, **OUTAGES[outages])  # type: ignore[arg-type]
    never, *others = (look_every(steps, strategy, cluster) for steps in (STEPS, 1, 5))
    assert [evaluation.step for evaluation in never.history] == [STEPS]
    assert max(never.counted["rosters"]) > 1 or outages == "no death"
    for looked, steps in zip(others, ([*range(1, STEPS + 1)], [5, 10, STEPS]), strict=True):
        assert [evaluation.step for evaluation in looked.history] == steps
        assert looked.counted == never.counted
        assert all(map(torch.equal, looked.weights, never.weights))
        assert looked.history[-1] == replace(never.history[-1], loss=looked.history[-1].loss)
        assert torch.equal(looked.seen[-1], never.seen[-1])
        seconds = [evaluation.seconds for evaluation in looked.history]
        assert seconds == sorted(seconds)
