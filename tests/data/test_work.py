"""Shared work: each batch has one worker, and the end comes when list scheduling says."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat import ASP, DSSP, GSSP, SSP, Oscars
from offbeat.data.work import AHEAD, ClaimsAhead, SharedCount
from offbeat.experiments.tasks.base import Batch
from offbeat.worlds.virtual.cluster import Absence, Cluster, Workers
from offbeat.worlds.virtual.step_times import Lognormal
from tests.support.virtual_runs import AnyStrategy, Kept, Run, close, play
from tests.support.waiting import until

pytestmark = pytest.mark.virtual

STRATEGIES: list[AnyStrategy] = [
    ASP(),
    SSP(staleness=0),
    SSP(staleness=2),
    DSSP(),
    GSSP(window=2),
    Oscars(tau=3),
]
SAMPLES, BATCH_SIZE = 100, 5


@dataclass(frozen=True, kw_only=True)
class Drawing(Kept):
    """Notes the samples of each gradient."""

    dimension: int = 16
    samples: int = SAMPLES
    batch_size: int = BATCH_SIZE
    drawn: list[tuple[int, ...]] = field(default_factory=list, compare=False)

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        self.drawn.append(tuple(batch[0].tolist()))
        return super().gradient(model, batch)


def quick_links(*step_s: Any, away: tuple[Absence, ...] = ()) -> Cluster:
    """Workers whose links take next to no time."""
    groups = [Workers(step_s=s, up_bits_per_s=1e15, down_bits_per_s=1e15) for s in step_s]
    return Cluster(workers=tuple(groups), away=away)


def share(strategy: AnyStrategy, steps: int, *step_s: Any, **rest: Any) -> tuple[Run, Drawing]:
    task, away = Drawing(), rest.pop("away", ())
    return play(quick_links(*step_s, away=away), strategy, steps, task=task, work="shared", **rest), task


# --- claims


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 150))
def test_every_number_is_claimed_once_in_any_order(turns: list[int], total: int) -> None:
    counter = count()
    claims = [ClaimsAhead(counter.__next__, total, 64) for _ in range(4)]
    claimed = [claims[turn].claim() for turn in turns]
    for each in claims:
        while (number := each.claim()) is not None:
            claimed.append(number)
    assert sorted(number for number in claimed if number is not None) == list(range(total))
    shared = SharedCount(total)
    assert [shared.claim() for _ in range(total + 2)] == [*range(total), None, None]


@pytest.mark.parametrize(("others", "spare"), [(0, 5), (3, 20), (12, 60), (3, 0)])
def test_claims_are_made_ahead_but_not_near_the_end(others: int, spare: int) -> None:
    """The others claim so many batches between two of this worker."""
    counter, taken, total = count(0, 1 + others), [], 20 * (1 + others) + 1

    def take() -> int:
        taken.append(next(counter))
        return taken[-1]

    claims, numbers = ClaimsAhead(take, total, spare), range(0, total, 1 + others)
    needed = 3 * (1 + AHEAD) * (1 + others) if spare else 0
    ahead = 0  # was claimed when this worker took its latest
    for own, number in enumerate(numbers):
        assert claims.claim() == number
        if total - number >= needed:
            ahead = own + 1 + AHEAD
        until(lambda own=own, ahead=ahead: len(taken) >= max(own + 1, ahead))
        assert len(taken) == max(own + 1, ahead), "nothing is claimed that others could do sooner"
    assert claims.claim() is None


def test_before_the_pace_is_known_many_batches_must_be_left() -> None:
    counter, taken = count(), []

    def take() -> int:
        taken.append(next(counter))
        return taken[-1]

    claims = ClaimsAhead(take, 31, 30)
    for number in range(2 * AHEAD + 2):
        assert claims.claim() == number
        ahead = AHEAD * (number < 2) if number < 2 else 0
        until(lambda number=number, ahead=ahead: len(taken) >= number + 1 + ahead)
    assert len(taken) == 2 * AHEAD + 2


# --- in virtual time


def test_the_end_is_that_of_list_scheduling() -> None:
    """Workers that take 1, 4, 1 and 1 s for a step: by hand, with a queue of who is free when."""
    step_s, steps = (1.0, 4.0, 1.0, 1.0), 25
    free = [(0.0, rank) for rank in range(4)]
    for _ in range(4 * steps):
        at, rank = heapq.heappop(free)
        heapq.heappush(free, (at + step_s[rank], rank))
    run, _ = share(ASP(), steps, *step_s)
    assert run.seconds == pytest.approx(max(at for at, _ in free), rel=1e-6)
    fluid_s = 4 * steps / sum(1 / s for s in step_s)
    assert fluid_s <= run.seconds <= fluid_s + max(step_s)
    equal = play(quick_links(*step_s), ASP(), steps, task=Drawing())
    assert equal.seconds == pytest.approx(steps * 4, rel=1e-6), "as long as the slowest takes for its part"
    assert equal.seconds / run.seconds > 2.8


speeds = st.lists(st.floats(0.5, 8), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(speeds, st.integers(1, 30))
def test_nobody_is_idle_before_the_last_batches(step_s: list[float], steps: int) -> None:
    run, _ = share(ASP(), steps, *step_s)
    fluid_s = len(step_s) * steps / sum(1 / s for s in step_s)
    assert fluid_s * (1 - 1e-6) <= run.seconds <= (fluid_s + max(step_s)) * (1 + 1e-6)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(STRATEGIES), speeds, st.integers(1, 25), st.integers(0, 9))
def test_all_train_the_batches_of_equal_work_each_once(
    strategy: AnyStrategy, step_s: list[float], steps: int, seed: int
) -> None:
    run, task = share(strategy, steps, *step_s, seed=seed)
    equal = Drawing()
    play(quick_links(*step_s), strategy, steps, task=equal, seed=seed)
    assert sorted(task.drawn) == sorted(equal.drawn)
    assert sum(run.each("steps")) == steps * len(step_s)
    assert sum(run.each("samples")) == sum(map(len, task.drawn))


def test_an_epoch_has_each_sample_once() -> None:
    workers, epochs = 4, 3
    steps = SAMPLES // BATCH_SIZE // workers * epochs
    _, task = share(ASP(), steps, 1.0, 2.3, 3.1, 0.7)
    per_epoch = SAMPLES // BATCH_SIZE
    drawn = [sample for batch in task.drawn for sample in batch]
    # Claims are in order, but batches end out of order at the border of two epochs: count each sample.
    assert [drawn.count(sample) for sample in range(SAMPLES)] == [epochs] * SAMPLES
    first = [sample for batch in task.drawn[: per_epoch - workers] for sample in batch]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.name}-{getattr(s, 'staleness', '')}")
def test_a_worker_that_leaves_takes_no_batch_with_it(strategy: AnyStrategy) -> None:
    gone, back = Absence(worker=1, from_s=2.0), Absence(worker=2, from_s=3.0, until_s=6.0)
    run, task = share(strategy, 15, 1.0, 1.1, 1.2, away=(gone, back))
    equal = Drawing()
    play(quick_links(1.0, 1.1, 1.2), strategy, 15, task=equal)
    assert sorted(task.drawn) == sorted(equal.drawn), "others do what it would have done"
    assert min(run.each("steps")) < 15 / 2


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.name}-{getattr(s, 'staleness', '')}")
def test_a_run_repeats_to_the_last_bit(strategy: AnyStrategy) -> None:
    jitter = Lognormal(median_s=1.0, sigma=0.8)
    (one, drawn), (other, again) = (share(strategy, 20, 1.0, jitter, jitter, seed=3) for _ in range(2))
    assert drawn.drawn == again.drawn
    assert one.history == other.history
    assert all(map(torch.equal, one.weights, other.weights))


def test_one_worker_shares_with_nobody() -> None:
    shared, drawn = share(ASP(), 12, 1.0)
    equal = play(quick_links(1.0), ASP(), 12, task=Drawing())
    assert torch.equal(shared.weights[0], equal.weights[0])
    assert shared.seconds == close(equal.seconds)
    assert len(drawn.drawn) == 12


@pytest.mark.parametrize("slow_s", [0.1, 1.0, 30.0])
def test_curves_share_their_steps_however_fast_worker_0_is(slow_s: float) -> None:
    jitter = Lognormal(median_s=1.0, sigma=0.5)
    runs = [share(ASP(), 20, slow_s, jitter, jitter, seed=s, evaluate_every=3)[0] for s in range(3)]
    for run in runs:
        assert [point.step for point in run.history] == [3, 6, 9, 12, 15, 18, 20]
        seconds = [point.seconds for point in run.history]
        assert seconds == sorted(seconds)
        assert run.seconds == max(run.each("seconds")), "the end is that of the last batch"


def test_an_evaluation_comes_when_so_many_batches_were_claimed() -> None:
    """Workers of 1 and 3 s do 4 batches in 3 s, so the 2n batches of n steps are claimed after 1.5n s."""
    run, _ = share(ASP(), 20, 1.0, 3.0, evaluate_every=4)
    for point in run.history[:-1]:
        assert abs(point.seconds - 1.5 * point.step) <= 3


def test_a_claim_that_gets_lost_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    share(ASP(), 5, 1.0, 2.0)
    assert "batches" not in caplog.text
    first = SharedCount.__init__

    def lose_one(self: SharedCount, total: int) -> None:
        first(self, total)
        self.claim()

    monkeypatch.setattr(SharedCount, "__init__", lose_one)
    share(ASP(), 5, 1.0, 2.0)
    assert "only 9 of 10 batches were trained" in caplog.text
