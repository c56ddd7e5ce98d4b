"""Auto among elastic workers in virtual time: deaths are in its choice, for they cost local steps."""

from __future__ import annotations

import pytest

from offbeat import Auto
from offbeat.core.ledger import Ledger
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Absence
from tests.support.virtual_runs import Kept, cluster_of

pytestmark = pytest.mark.virtual

STEP_S = 0.004  # an exchange takes as long with two workers, and a third longer with three
STEPS = 22
WINDOW = 4


def changes(workers: int, *deaths_s: float) -> list[str]:
    """Return what Auto changes to when the last workers die at these seconds, one each."""
    dead = tuple(Absence(worker=workers - 1 - k, from_s=at_s) for k, at_s in enumerate(deaths_s))
    cluster = cluster_of(*[STEP_S] * workers, away=dead)
    strategy = Auto(window=WINDOW)
    job = Job(task=Kept(), strategy=strategy, workers=workers, steps=STEPS, evaluate_every=STEPS)
    kept: list[Ledger] = []

    def keep(ledgers: list[Ledger]) -> list[Callback]:
        kept.extend(ledgers)
        return []

    simulate(job, cluster, Kept().load(), keep, minimum=1)
    return [text.partition(" instead of ")[0] for _, _, kind, text in kept[0].events if kind == "changed"]


def test_a_death_makes_it_choose_a_shorter_period() -> None:
    """T(8) = (C + K/8)(1 + 3.5 d) and T(4) = (C + K/4)(1 + 1.5 d) with K = C and d = 1 death in 2 x 12 steps.

    Without a death T(4) is a tenth longer, with it a thirtieth, and a twentieth is not worth a longer period.
    """
    assert changes(2) == changes(3) == ["LocalSGD(period=8)"]
    assert changes(3, 2.5 * STEP_S) == ["LocalSGD(period=4)"]
