"""Oscars in virtual time: to the event where that can be worked out, else bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat import BSP, Oscars
from offbeat.cli import progress
from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.virtual_run import simulate
from offbeat.server.half import ServerHalf
from offbeat.strategies import oscars
from offbeat.strategies.oscars.round_plan import SLACK
from offbeat.strategies.oscars.rule import Rounds, RoundState
from offbeat.worlds.virtual.cluster import Absence, Cluster, ServerMachines, Slowdown, Workers
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from offbeat.worlds.virtual.step_times import Lognormal, Trace
from tests.support.commands import WORKERS, command, summary_of
from tests.support.virtual_runs import WEIGHTS, Run, close, cluster_of, play
from tests.support.virtual_servers import SEND_S, TRIP_S, WIDE, accuracy, clusters

pytestmark = pytest.mark.virtual

UNTIMED = oscars.UNTIMED + 1  # rounds of one step each: in the last of them a step is timed
MIXED = (0.1, 0.1, 0.2, 0.4)


class Noted(NamedTuple):
    """A round, when it begins."""

    at_s: float
    tau: int
    steps: dict[int, int]
    awaited: set[int]


@dataclass(frozen=True, kw_only=True)
class Watched(Oscars):
    """The rounds of all shards stay at hand."""

    rounds: list[Noted] = field(default_factory=list, compare=False)

    def server_half(self) -> ServerHalf:
        noted = self.rounds

        class Noting(Rounds):
            def _begin_round(self, state: RoundState) -> None:
                super()._begin_round(state)
                noted.append(Noted(state.now_s, state.tau, dict(state.plan.steps), set(state.awaited)))

        return replace(super().server_half(), aggregation=Noting)


def watched(cluster: Cluster, steps: int, **settings_: Any) -> tuple[Run, list[Noted]]:
    strategy = Watched(**settings_)
    return play(cluster, strategy, steps), strategy.rounds


# --- closed forms


def test_everybody_computes_until_the_others_arrive() -> None:
    """1×, 1×, 2× and 4×: three rounds of one step each, of 0.4 s, then 16, 16, 8 and 4 steps in 1.6 s.

    Beyond that a round takes a trip.
    """
    planned = 3
    steps = UNTIMED + 16 * planned
    run, rounds = watched(cluster_of(*MIXED, server=WIDE), steps)
    assert [noted.steps for noted in rounds[: UNTIMED - 1]] == [{}] * (UNTIMED - 1)
    for noted in rounds[UNTIMED - 1 : UNTIMED + planned - 1]:
        assert noted.steps == {0: 16, 1: 16, 2: 8, 3: 4}
        assert noted.awaited == {0, 1, 2, 3}
    lengths = [after.at_s - before.at_s for before, after in pairwise(rounds[: UNTIMED + planned])]
    assert lengths == [close(0.4 + TRIP_S)] * (UNTIMED - 1) + [close(1.6 + TRIP_S)] * planned
    fast = run.ledgers[0].totals()
    assert fast.sync_steps == UNTIMED + planned
    assert fast.wait_s == close(UNTIMED * 0.3 + (UNTIMED + planned) * TRIP_S)
    assert fast.bytes_sent == fast.sync_steps * (WEIGHTS + REQUEST_BYTES)
    assert run.each("staleness_max") == [0] * 4
    assert run.each("planned_steps") == [16, 16, 8, 4]


def test_nearly_all_samples_that_the_workers_could_do_alone() -> None:
    """Ten rounds: what all do by then, against 10 + 10 + 5 + 2.5 steps a second."""
    _, rounds = watched(cluster_of(*MIXED, server=WIDE), UNTIMED + 160)
    began, ended = rounds[UNTIMED - 1], rounds[UNTIMED + 9]
    together = 10 * sum(began.steps.values()) / (ended.at_s - began.at_s)
    assert together == close(27.5 * 1.6 / (1.6 + TRIP_S))


def test_a_busy_round_computes_as_long_as_it_exchanges() -> None:
    """Steps of a quarter of a millisecond, τ = 1; an exchange is taken as 2 SEND, and takes a trip."""
    step_s = 0.00025
    cluster = cluster_of(step_s, step_s, server=WIDE)
    idle, busy = (watched(cluster, 200, tau=1, busy=busy) for busy in (0, 0.5))
    fitting = math.floor(2 * SEND_S * (1 + SLACK) / step_s)
    assert fitting > 30
    assert [rounds[UNTIMED - 1].steps[0] for _, rounds in (idle, busy)] == [1, fitting]
    for _, rounds in (idle, busy):
        began, after = rounds[UNTIMED - 1 : UNTIMED + 1]
        assert after.at_s - began.at_s == close(began.steps[0] * step_s + TRIP_S)


def test_an_exchange_that_takes_longer_leaves_room_for_fewer_steps() -> None:
    """Worker 1's links are twenty times slower: to it, a push takes 20 SEND."""
    wide = cluster_of(0.1, server=WIDE).workers[0]
    narrow = replace(wide, up_bits_per_s=wide.up_bits_per_s / 20, down_bits_per_s=wide.down_bits_per_s / 20)
    _, rounds = watched(Cluster(workers=(wide, narrow, wide), server=WIDE), 40, tau=16)
    fitting = math.floor((1.6 * (1 + SLACK) - 2 * 20 * SEND_S + 2 * SEND_S) / 0.1)
    assert fitting == 15
    assert rounds[UNTIMED - 1].steps == {0: 16, 1: fitting, 2: 16}
    assert all(noted.awaited == {0, 1, 2} for noted in rounds[:UNTIMED])


@pytest.mark.parametrize("server", [None, WIDE], ids=["beside", "wide"])
@pytest.mark.parametrize("settings_", [{}, {"normalise": True, "weighted": False}], ids=str)
def test_one_step_each_is_bsp(server: ServerMachines | None, settings_: dict[str, Any]) -> None:
    cluster = cluster_of(0.1, 0.1, 0.1, server=server)
    ours, rounds = watched(cluster, 12, tau=1, **settings_)
    bsp = play(cluster_of(0.1, 0.1, 0.1), BSP(), 12)
    assert all(set(noted.steps.values()) <= {1} for noted in rounds)
    assert ours.each("sync_steps") == [12] * 3
    for weights in ours.weights:
        assert torch.equal(weights, ours.weights[0])
        torch.testing.assert_close(weights, bsp.weights[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings_", [{}, {"tau": 1}, {"normalise": True}], ids=str)
def test_alone_it_is_the_plain_loop(settings_: dict[str, Any]) -> None:
    ours = play(cluster_of(0.1), Oscars(**settings_), 30)
    plain = play(cluster_of(0.1), BSP(), 30)
    torch.testing.assert_close(ours.weights[0], plain.weights[0], rtol=0, atol=1e-6)


def test_rounds_lengthen_as_the_loss_falls() -> None:
    """The shards beside the workers find the same rounds, each for itself."""
    cluster = cluster_of(0.1, 0.2, server=WIDE)
    taus = {}
    for schedule in ("fixed", "lengthen", "shorten"):
        _, rounds = watched(cluster, 60, schedule=schedule)
        taus[schedule] = [noted.tau for noted in rounds]
    assert set(taus["fixed"]) == {4}
    assert max(taus["lengthen"]) > 4 > min(taus["shorten"]) >= 1
    _, rounds = watched(cluster_of(0.1, 0.2), 60, schedule="lengthen")
    assert [noted.steps for noted in rounds[::2]] == [noted.steps for noted in rounds[1::2]]


# --- what changes in mid-run


def test_one_who_turns_slow_is_given_fewer_steps_within_two_rounds() -> None:
    """Worker 0, four times slower from 3 s on. Its round of then ends early, so that nobody waits for long;
    the next plan knows."""
    slow = (Slowdown(workers=(0,), from_s=3.0, factor=4),)
    run, rounds = watched(cluster_of(*MIXED, server=WIDE, slow=slow), 80)
    steps = [noted.steps.get(0, 1) for noted in rounds]
    (during,) = (k for k, (one, two) in enumerate(pairwise(rounds)) if one.at_s <= 3.0 < two.at_s)
    assert steps[during] == 16
    assert steps[during + 2] < steps[during + 1] < 16
    assert [noted.steps[0] for noted in rounds if 0 in noted.steps][-1] == 4, "as it should"
    lengths = [two.at_s - one.at_s for one, two in pairwise(rounds[during : during + 5])]
    assert max(lengths) < 1.2 * (1.6 + 2 * SEND_S) + 1e-9, "no round waits beyond its deadline"
    assert run.ledgers[3].totals().staleness_max <= 1


@pytest.mark.parametrize(("stall_s", "refused"), [(0.7, 0), (5.0, 1)])
def test_a_round_ends_at_its_deadline(stall_s: float, refused: int) -> None:
    """Worker 1's ninth step, the second of a round of four, takes long. The others wait for it until the
    deadline; its update comes a round late, or far too late."""
    stalled = Trace(trace_s=tuple(stall_s if step == 9 else 0.1 for step in range(1, 101)))
    run, rounds = watched(cluster_of(0.1, stalled, 0.1, server=WIDE), 100)
    begins = UNTIMED  # one planned round goes before
    assert rounds[begins].awaited == {0, 1, 2} and rounds[begins + 1].awaited == {0, 2}
    assert rounds[begins + 1].at_s - rounds[begins].at_s == close(1.2 * (0.4 + 2 * SEND_S))
    assert run.each("refused") == [0, refused, 0]
    assert run.each("staleness_max") == [1 - refused] * 3


def test_one_who_turns_fast_is_given_more() -> None:
    slow = (Slowdown(workers=(0,), until_s=3.0, factor=4),)
    _, rounds = watched(cluster_of(*MIXED, server=WIDE, slow=slow), 200)
    steps = [noted.steps.get(0, 1) for noted in rounds if len(noted.awaited) == 4]
    assert steps[UNTIMED] == 4 and max(steps) >= 14


def test_one_who_leaves_for_good_ends_no_run() -> None:
    away = (Absence(worker=3, from_s=5.0, until_s=math.inf),)
    run, rounds = watched(cluster_of(*MIXED, server=WIDE, away=away), 100)
    steps = run.each("steps")
    assert steps[:3] == [100] * 3 and steps[3] < 100
    before = [noted for noted in rounds if 3 in noted.awaited]
    after = rounds[len(before) + 1]
    assert before[-1].steps == {0: 16, 1: 16, 2: 8, 3: 4}
    assert after.steps == {0: 8, 1: 8, 2: 4}, "the slowest of those who are left sets the pace"


def test_one_who_comes_back_is_planned_with_the_pace_that_it_had() -> None:
    away = (Absence(worker=1, from_s=4.0, until_s=9.0),)
    run, rounds = watched(cluster_of(*MIXED, server=WIDE, away=away), 200)
    assert run.each("steps") == [200] * 4
    without = [k for k, noted in enumerate(rounds) if noted.awaited == {0, 2, 3}]
    assert len(without) >= 2
    again = [noted.steps.get(1, 1) for noted in rounds[without[-1] + 1 :] if 1 in noted.awaited]
    assert again[: UNTIMED + 1] == [16] * (UNTIMED + 1)
    assert run.ledgers[1].totals().staleness_max <= 2


@pytest.mark.parametrize("strategy", [Oscars(), Oscars(tau=1)], ids=str)
def test_worker_0_looks_alone_and_changes_nothing(strategy: Oscars) -> None:
    cluster = cluster_of(0.1, 0.25, 0.13)
    often, once = (play(cluster, strategy, 30, evaluate_every=n) for n in (1, 100))
    assert all(map(torch.equal, often.weights, once.weights))
    assert often.history[-1].value == once.history[-1].value
    assert [one.totals() for one in often.ledgers] == [one.totals() for one in once.ledgers]


# --- the plan is visible


def test_the_plan_is_in_the_summary_and_on_the_screen(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(WORKERS + WORKERS.replace("0.1", "0.3"))
    args = ["--cluster", tmp_path / "mine.toml", "--workers", 2, "--steps", 60]
    said = command("simulate", "quadratic", "--strategy", "oscars", *args, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    workers = summary_of(tmp_path / "out")["per_worker"]
    assert [worker["planned_steps"] for worker in workers] == [12, 4]
    assert "planned steps" in said.out


def test_the_progress_display_shows_the_plan() -> None:
    entries = [WorkerTotals(rank=rank, planned_steps=steps) for rank, steps in enumerate((16, 16, 8, 4))]
    assert progress._planned_steps(entries) == ["planned steps 16 16 8 4"]
    assert progress._planned_steps(entries * 3) == ["planned steps 4 to 16"]
    assert progress._planned_steps([WorkerTotals(rank=0), WorkerTotals(rank=1)]) == [], "nobody plans"


# --- any cluster

SETTINGS: list[dict[str, Any]] = [
    {},
    {"tau": 1, "lateness": 0},
    {"tau": 2, "patience": 0.0, "quantile": 0.5},
    {"normalise": True, "weighted": False, "lateness": 1},
    {"schedule": "lengthen", "limit": 1.5, "belief": 1.0},
    {"schedule": "shorten", "tau": 9, "patience": 0.0},
]
BOTH_AWAY = (Absence(worker=1, from_s=0.02, until_s=0.7), Absence(worker=0, from_s=0.3, until_s=0.5))
faults = st.sampled_from(
    [
        (),
        (Absence(worker=0, from_s=0.01, until_s=0.4),),
        (Absence(worker=1, from_s=0.5, until_s=math.inf),),
        BOTH_AWAY,
    ]
)


UNLIKE = Cluster(
    workers=(
        Workers(step_s=Lognormal(median_s=0.3, sigma=0.8), up_bits_per_s=1e6, down_bits_per_s=1e5),
        Workers(step_s=0.001, up_bits_per_s=1e5, down_bits_per_s=1e6),
    )
)


@settings(max_examples=15, deadline=None)
@given(clusters, faults, st.sampled_from(SETTINGS))
@example(UNLIKE, BOTH_AWAY, {})  # all came anew, and each was the first at one shard
def test_nobody_is_stuck_and_nothing_is_staler_than_allowed(
    cluster: Cluster, away: tuple[Absence, ...], settings_: dict[str, Any]
) -> None:
    present = tuple(spell for spell in away if spell.worker < cluster.size)
    cluster = replace(cluster, away=present)
    steps = 12
    (run, rounds), (again, repeated) = (watched(cluster, steps, **settings_) for _ in range(2))
    strategy = Oscars(**settings_)
    gone = {spell.worker for spell in present if spell.until_s == math.inf}
    for ledger in run.ledgers:
        entry = ledger.totals()
        assert entry.steps == steps or ledger.rank in gone
        assert entry.staleness_max <= strategy.lateness
        assert 1 <= entry.sync_steps <= steps
        assert sum(entry.staleness.values()) == entry.sync_steps
        assert entry.wait_s <= ledger.seconds * (1 + 1e-9)
    for noted in rounds:
        assert all(1 <= n <= max(1, strategy.limit * noted.tau) for n in noted.steps.values())
    assert repeated == rounds
    assert all(map(torch.equal, again.weights, run.weights))
    assert [one.totals() for one in again.ledgers] == [one.totals() for one in run.ledgers]


# --- it trains


def test_digits_come_within_a_point_of_bsp() -> None:
    """As worker 0 sees it before its last step: the slower ones, who are left alone then, go on for long."""
    steps = 220  # ten epochs
    job = Job(task=Digits(), strategy=Oscars(), workers=4, steps=steps, evaluate_every=steps - 1)
    ours = simulate(job, cluster_of(0.05, 0.05, 0.1, 0.2), Digits().load())[0].value
    assert ours >= accuracy(BSP(), 0.05) - 0.01
