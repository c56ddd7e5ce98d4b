"""Random failures: lives and absences by seed and worker, and clusters that have them."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from offbeat.errors import SettingError
from offbeat.worlds.virtual.cluster import Churn
from offbeat.worlds.virtual.failures import RandomFailures, churn_of
from tests.support.virtual_runs import cluster_of

FAILURES = RandomFailures(mtbf_s=100.0, rejoin_s=5.0)


def test_lives_have_their_mean_and_absences_their_length() -> None:
    away = FAILURES.absences(worker=3, seed=1, until_s=400_000.0)
    assert all(absence.worker == 3 for absence in away)
    assert all(absence.until_s - absence.from_s == pytest.approx(5.0) for absence in away)
    ends = [0.0, *(absence.until_s for absence in away)]
    lives = [absence.from_s - end for absence, end in zip(away, ends, strict=False)]
    assert min(lives) > 0
    assert fmean(lives) == pytest.approx(100.0, rel=0.05)
    assert fmean(life > 100.0 for life in lives) == pytest.approx(0.368, abs=0.03), "as exp(−1)"


def test_a_longer_schedule_begins_with_the_shorter_and_others_have_their_own() -> None:
    short, longer = (FAILURES.absences(0, 7, until_s) for until_s in (500.0, 5000.0))
    assert 0 < len(short) < len(longer)
    assert longer[: len(short)] == short
    assert FAILURES.absences(1, 7, 5000.0)[0].from_s != short[0].from_s
    assert FAILURES.absences(0, 8, 5000.0)[0].from_s != short[0].from_s


def test_a_cluster_gets_the_absences_of_all_that_are_not_spared() -> None:
    cluster = cluster_of(0.1, 0.1, 0.1)
    away = FAILURES.applied(cluster, seed=0, until_s=1000.0).away
    assert {absence.worker for absence in away} == {0, 1, 2}
    spared = FAILURES.applied(cluster, seed=0, until_s=1000.0, spared=1).away
    assert spared == tuple(absence for absence in away if absence.worker)
    with pytest.raises(SettingError, match="says itself when workers are away"):
        FAILURES.applied(FAILURES.applied(cluster, 0, 1000.0), 0, 1000.0)


CHURN = Churn(mean_life_s=100.0, away_s=(5.0, 20.0, 80.0))


def test_absences_last_as_the_trace_says_and_workers_begin_elsewhere_in_it() -> None:
    source = churn_of(replace(cluster_of(0.1), churn=CHURN))
    assert source is not None and not source.paid_away
    begins = set()
    for worker in range(20):
        away = source.absences(worker, seed=0, until_s=2000.0)
        lengths = [absence.until_s - absence.from_s for absence in away]
        first = CHURN.away_s.index(round(lengths[0], 6))
        begins.add(first)
        assert lengths == pytest.approx([CHURN.away_s[(first + n) % 3] for n in range(len(away))])
    assert begins == {0, 1, 2}
    away = source.absences(0, seed=0, until_s=400_000.0)
    alive = 1 - sum(absence.until_s - absence.from_s for absence in away) / 400_000.0
    assert alive == pytest.approx(100.0 / (100.0 + 35.0), rel=0.05), "mean life over mean life and absence"


def test_a_cluster_with_churn_takes_no_other_failures() -> None:
    cluster = replace(cluster_of(0.1, 0.1), churn=CHURN)
    with pytest.raises(SettingError, match="says itself when workers are away"):
        FAILURES.applied(cluster, 0, 1000.0)
    source = churn_of(cluster)
    assert source is not None and churn_of(cluster_of(0.1)) is None
    applied = source.applied(cluster, 0, 1000.0)
    assert applied.churn is None and applied.away
    assert [applied.absences(worker) for worker in (0, 1)] == [
        tuple(source.absences(worker, 0, 1000.0)) for worker in (0, 1)
    ]
