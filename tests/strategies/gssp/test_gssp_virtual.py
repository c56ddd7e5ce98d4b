"""GSSP in virtual time: one group is SSP; groups run as fast as each could alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offbeat import BSP, GSSP, SSP, GDTopK
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.digits import Digits
from offbeat.server.server import ParameterServer
from offbeat.worlds.virtual import server as virtual_server
from offbeat.worlds.virtual.cluster import Absence, ServerMachines, Slowdown, load_cluster
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from offbeat.worlds.virtual.step_times import Lognormal
from tests.support.virtual_runs import Kept, Run, close, cluster_of, play
from tests.support.virtual_servers import ONE_NIC, TRIP_S, WIDE

pytestmark = pytest.mark.virtual

servers: list[ParameterServer] = []


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep all shards at hand."""

    class Watched(ParameterServer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            servers.append(self)

    monkeypatch.setattr(virtual_server, "ParameterServer", Watched)


def watched(cluster: Any, strategy: GSSP, steps: int, **rest: Any) -> tuple[Run, list[ParameterServer]]:
    servers.clear()
    run = play(cluster, strategy, steps, **rest)
    return run, list(servers)


def steps_a_second(run: Run) -> float:
    """Of all workers, while each was at it."""
    return sum(ledger.totals().steps / ledger.seconds for ledger in run.ledgers)


# --- degenerate


def the_same(one: Run, other: Run) -> None:
    for what in ("seconds", "compute_s", "wait_s", "bytes_sent", "staleness"):
        assert one.each(what) == other.each(what)
    assert all(map(torch.equal, one.weights, other.weights))
    assert one.history == other.history


@pytest.mark.parametrize("server", [None, ONE_NIC], ids=["beside", "one"])
@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize(
    ("groups", "step_s"),
    [("0-3", (0.1, 0.4, 0.2, 0.1)), ("auto", (0.1, 0.11, 0.1, 0.12))],
    ids=["fixed", "auto"],
)
def test_one_group_is_ssp(
    server: ServerMachines | None, staleness: int, groups: str, step_s: tuple[float, ...]
) -> None:
    cluster = cluster_of(*step_s, server=server)
    ours = play(cluster, GSSP(groups=groups, staleness=staleness), 20, evaluate_every=6)
    the_same(ours, play(cluster, SSP(staleness=staleness), 20, evaluate_every=6))


def test_one_group_without_staleness_is_bsp() -> None:
    cluster = cluster_of(0.1, 0.4, 0.2)
    ours, bsp = play(cluster, GSSP(groups="0-2", staleness=0), 10), play(cluster, BSP(), 10)
    for weights in ours.weights:
        torch.testing.assert_close(weights, bsp.weights[0], rtol=0, atol=1e-5)


# --- closed forms


def test_every_group_runs_as_if_it_were_alone() -> None:
    """Two of a kind in lock step, and two singles: nobody waits for another group."""
    cluster = cluster_of(0.1, 0.1, 0.3, 1.0, server=WIDE)
    run = play(cluster, GSSP(groups="0,1/2/3", staleness=0), 20)
    assert [ledger.seconds for ledger in run.ledgers] == [
        close(20 * (s + TRIP_S)) for s in (0.1, 0.1, 0.3, 1)
    ]
    overlapping = play(cluster, GSSP(groups="0,1/2/3"), 20)
    assert [led.seconds for led in overlapping.ledgers] == [
        close(20 * s + TRIP_S) for s in (0.1, 0.1, 0.3, 1)
    ]


def test_measured_groups_run_apart_after_the_first_steps() -> None:
    """Until the slow one has made `window` steps, it is SSP; then each goes at its own pace."""
    window, steps, staleness = 4, 40, 2
    cluster = cluster_of(0.1, 0.1, 1.0, server=WIDE)
    run, (server,) = watched(cluster, GSSP(window=window, staleness=staleness, overlap=False), steps)
    assert server.state.regroupings == 1
    fast, slow = run.ledgers[0].totals(), run.ledgers[2].totals()
    assert slow.seconds == close(steps * (1.0 + TRIP_S))
    made = window - 1 + staleness + 1  # when the slow one, too, has pushed for the last time in this window
    assert fast.seconds == close(window * (1.0 + TRIP_S) + (steps - made) * (0.1 + TRIP_S))


def test_the_papers_cluster_is_grouped_right_and_runs_at_the_sum_of_its_speeds() -> None:
    """Four groups of four: 1/0.1 + 1/0.15 + 1/0.2 + 1/0.4 against 4/0.4 is 2.42, if nobody waits."""
    cluster = load_cluster("paper-gssp")
    truth = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    run, shards = watched(cluster, GSSP(window=3), 60)
    assert all(shard.state.regroupings == 1 for shard in shards), "found at once, and kept"
    assert all([sorted(w) for w in _seats(shard)] == truth for shard in shards)
    ssp, bsp = (play(cluster, strategy, 20) for strategy in (SSP(), BSP()))
    assert steps_a_second(run) > 2.2 * steps_a_second(bsp)
    assert steps_a_second(run) > 1.46 * steps_a_second(ssp)
    assert max(run.each("staleness_max")) <= 3


def _seats(server: ParameterServer) -> list[list[int]]:
    """Who sits where, be it that some have finished."""
    group = server.state.group
    return [[w for w in group if group[w] == number] for number in sorted(set(group.values()))]


# --- whatever happens


def test_one_that_becomes_slow_changes_groups_and_comes_back() -> None:
    slow = (Slowdown(workers=(1,), factor=4.0, from_s=10.0, until_s=60.0),)
    cluster = cluster_of(0.5, 0.5, 2.0, server=WIDE, slow=slow)
    steps = 120
    run, (server,) = watched(cluster, GSSP(window=4, groups="auto"), steps)
    assert server.state.regroupings >= 3, "apart, together with the slow one, and back"
    never_together = play(cluster, SSP(), steps)
    assert run.ledgers[0].seconds < 0.5 * steps + 20.0, "the fast one was held up for some steps only"
    assert never_together.ledgers[0].seconds > 2.0 * (steps - 4)
    assert max(run.each("staleness_max")) <= 3


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from([0.1, 0.2, 0.35, 0.8]), min_size=2, max_size=5),
    st.integers(0, 2),
    st.floats(0.01, 0.4),
    st.integers(0, 4),
    st.integers(0, 99),
)
def test_no_run_hangs_and_the_bound_holds(
    step_s: list[float], staleness: int, sigma: float, slow: int, seed: int
) -> None:
    """Shards beside the workers regroup at moments of their own, again and again; one worker is away for a
    time, another is slow for one."""
    world = len(step_s)
    cluster = cluster_of(
        *(Lognormal(median_s=s, sigma=sigma) for s in step_s),
        slow=(Slowdown(workers=(slow % world,), factor=5.0, from_s=1.0, until_s=6.0),),
        away=(Absence(worker=(slow + 1) % world, from_s=0.8, until_s=3.0),),
    )
    run, shards = watched(
        cluster, GSSP(window=2, staleness=staleness, likeness=1.1), 25, seed=seed, evaluate_every=7
    )
    assert run.each("steps") == [25] * world
    assert max(run.each("staleness_max")) <= staleness
    assert len(shards) == world
    again = play(cluster, GSSP(window=2, staleness=staleness, likeness=1.1), 25, seed=seed, evaluate_every=7)
    the_same(run, again)


# --- GDTopK


def sparse(**settings: Any) -> GSSP:
    return GSSP(groups="0,1/2/3", sparse=GDTopK(epoch_steps=5, **settings))


FOUR = (0.1, 0.1, 0.3, 1.0)


def test_ratio_one_is_gssp_without_sparsification() -> None:
    cluster = cluster_of(*FOUR)
    the_same(play(cluster, sparse(ratio=1.0, answers="full"), 12), play(cluster, GSSP(groups="0,1/2/3"), 12))


def test_bytes_by_hand() -> None:
    """One server; 1008 padded floats. A packet of TopK: 6 bytes an entry. Answers: 2 bytes an entry."""
    cluster = cluster_of(*FOUR, server=WIDE)
    run = play(cluster, sparse(), 10)  # two epochs of 5 steps
    for rank, ratio in enumerate((0.25, 0.25, 0.3, 0.35)):
        pushes = 6 * (4 * round(0.35 * 1008) + 4 * round(ratio * 1008)) + 2 * 4 * 1008
        assert run.each("bytes_left_host")[rank] == pushes + 10 * REQUEST_BYTES
    reverse = play(cluster, sparse(more="fast"), 10)
    pushes = 6 * (4 * round(0.35 * 1008) + 4 * round(0.25 * 1008)) + 2 * 4 * 1008
    assert reverse.each("bytes_left_host")[3] == pushes + 10 * REQUEST_BYTES
    full = play(cluster_of(*FOUR), sparse(answers="full"), 10)
    half = play(cluster_of(*FOUR), sparse(), 10)
    answers = 10 * 3 * 4 * 252 * 4  # ten times, of each of four shards, to three others
    assert sum(full.each("bytes_left_host")) - sum(half.each("bytes_left_host")) == answers / 2


def test_what_was_kept_back_is_pushed_at_the_end_of_an_epoch() -> None:
    """Every step adds 1 to every weight: half of it by each of the two."""
    servers.clear()
    watched_sparse = GSSP(groups="0/1", sparse=GDTopK(epoch_steps=4, ratio=0.01, answers="full"))
    run = play(cluster_of(0.1, 0.4, server=WIDE), watched_sparse, 8, task=Drifting())
    (server,) = servers
    for weights in (
        server.aggregation.weights_for(server.state, 0),
        server.aggregation.weights_for(server.state, 1),
    ):
        torch.testing.assert_close(weights[0][:1000], torch.full((1000,), 8.0))
    assert run.each("steps") == [8, 8]
    servers.clear()
    play(cluster_of(0.1, 0.4, server=WIDE), watched_sparse, 3, task=Drifting())
    sent = servers[0].weights[0].sum().item()
    assert sent == 2 * 10 * 0.5 * (1 + 2 + 3), "ten entries each time, which had waited the longer"


@dataclass(frozen=True, kw_only=True)
class Drifting(Kept):
    """Every step adds 1 to every weight, which starts at 0."""

    def build(self) -> nn.Module:
        model = super().build()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Drift(model.parameters(), {})


class Drift(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(1.0)


def test_shards_of_data_rotate_where_an_epoch_ends() -> None:
    """`--order seldp` goes to the next chunk after as many steps as GDTopK is told that an epoch has."""
    task = Digits()
    data = task.load()
    job = Job(task=task, strategy=GSSP(sparse=GDTopK()), workers=4, order="seldp")
    steps = job.steps_per_epoch(len(data))
    drawn = [list(islice(job.batches(data, rank, task.batch_size), 2 * steps)) for rank in range(4)]
    first, second = ([torch.cat(d[k : k + steps]) for d in drawn] for k in (0, steps))
    chunks = [set(c.tolist()) for c in first]
    for rank, chunk in enumerate(second):
        others = len(set(chunk.tolist()) & chunks[(rank + 1) % 4])
        assert others > 0.9 * len(chunk), "its neighbour's"
