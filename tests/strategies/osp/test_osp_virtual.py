"""OSP in virtual time: what a step takes, by hand; a budget that finds what hides, and follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from offbeat import BSP, OSP
from offbeat.core.replica import Replica
from offbeat.strategies.osp import OSPState
from offbeat.worlds.virtual.cluster import Cluster, Slowdown, Workers
from tests.support.osp_runs import GRADIENT, SIZES, TOTAL, Many, Steps, Watched, sizes_of
from tests.support.virtual_runs import BYTES_PER_S, close, cluster_of, keep_spans, play, ring_s

pytestmark = pytest.mark.virtual


def a_step(cluster: Cluster, strategy: Any, task: Steps) -> float:
    """Seconds of the seventh step: the last of all waits for what it sent, so it is left out."""
    seven, six = (play(cluster, strategy, n, task=Steps(sizes_kib=task.sizes_kib)).seconds for n in (7, 6))
    return seven - six


@pytest.mark.parametrize("world", [2, 4])
def test_what_hides_costs_nothing(world: int) -> None:
    """The last block of backward is late, and hides: only the one before it is waited for, not the last."""
    task = Steps(sizes_kib=(16, 16, 64))
    # in backward order 64, 16, 16; the gradients of the first are smallest, so the last must be pushed in
    strategy = OSP(budget=0.7, **GRADIENT)
    cluster = cluster_of(*[60.0] * world, forward_share=0.25)
    sizes = sizes_of(task)
    assert a_step(cluster, strategy, task) == close(60.0 + ring_s(sum(sizes[1:]), world))
    assert a_step(cluster, BSP(), task) == close(60.0 + ring_s(sum(sizes), world)), "one block, at the end"


@pytest.mark.parametrize("world", [2, 4])
def test_a_late_last_block_leaves_a_small_one_for_the_end(world: int) -> None:
    task = Steps(sizes_kib=(64, 16, 64))

    @dataclass(frozen=True, kw_only=True)
    class LastLate(OSP):
        def _split(self, state: OSPState, replica: Replica, port: Any, news: bool = True) -> None:
            state.late, state.runs = [2], self._runs(replica, [2])

    cluster = cluster_of(*[60.0] * world, forward_share=0.25)
    sizes = sizes_of(task)
    assert a_step(cluster, LastLate(budget=0.5), task) == close(60.0 + ring_s(sizes[1], world))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("budget", [0.2, 0.5, 0.9])
def test_where_the_network_is_all_there_is_nothing_but_bytes_counts(world: int, budget: float) -> None:
    """The network is never idle; BSP leaves it idle in each forward."""
    task = Steps(sizes_kib=(64, 16, 64))
    cluster = cluster_of(*[0.01] * world, forward_share=0.25)
    all_of_it = ring_s(sum(sizes_of(task)), world)
    assert a_step(cluster, OSP(budget=budget, **GRADIENT), task) == close(all_of_it)
    assert a_step(cluster, BSP(), task) == close(0.01 + all_of_it)


def test_what_is_late_travels_in_the_background_at_once() -> None:
    books: list[Any] = []

    def prepare(ledgers: Any) -> None:
        keep_spans(ledgers)
        books.extend(ledgers)

    play(cluster_of(1.0, 1.0), OSP(budget=0.9, **GRADIENT), 12, task=Steps(), prepare=prepare)
    behind = [span for span in books[0].spans if span.kind == "back"]
    assert len(behind) == 9 + 2, "one a step from the fourth on, and two questions"


# --- the budget that is found


def found(step_s: float, world: int = 2, **settings: Any) -> Watched:
    """What "auto" found, a worker's step taking so long."""
    strategy = Watched(**GRADIENT, **settings)
    cluster = cluster_of(*[step_s] * world, forward_share=0.25)
    play(cluster, strategy, 40, task=Many())
    return strategy


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("ring", "late"), [(0.1, 0.0), (0.4, 0.0), (1.0, 0.5), (2.0, 0.25), (4.0, 0.125)], ids=str
)
def test_no_more_is_late_than_need_be(world: int, ring: float, late: float) -> None:
    """`ring` seconds of an all-reduce to one of computing. Half of computing takes what is sent in backward:
    the network is to be busy in the other half. A step longer than that hides all, and nothing is late."""
    step_s = ring_s(TOTAL, world) / ring
    strategy = found(step_s, world)
    for state in strategy.states:
        assert state.late == strategy.states[0].late
        assert state.meter.compute_s == close(step_s)
        assert state.meter.bytes_per_s == close(BYTES_PER_S)
    part = sum(SIZES[i] for i in strategy.lates[-1]) / TOTAL
    assert part == pytest.approx(late, abs=0.1), "to a block"


@pytest.mark.parametrize("ring", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("sizes_kib", [(300,) * 10, (2000, 300, 300, 300), (300, 300, 2000, 300)], ids=str)
def test_it_is_as_fast_as_the_best_fixed_budget(ring: float, sizes_kib: tuple[int, ...]) -> None:
    task = Steps(sizes_kib=sizes_kib)
    step_s = ring_s(sum(sizes_of(task)), 2) / ring
    cluster = cluster_of(step_s, step_s, forward_share=1 / 3)

    def a_late_step(strategy: OSP) -> float:
        more, less = (play(cluster, strategy, n, task=Steps(sizes_kib=sizes_kib)).seconds for n in (41, 40))
        return more - less

    budgets = [budget for budget in (0.0, 0.4, 0.8) if budget <= 1 / ring]  # what hides
    fixed = [a_late_step(OSP(budget=budget, **GRADIENT)) for budget in budgets]
    assert a_late_step(OSP(**GRADIENT)) <= min(fixed) + 0.02 * step_s + 1e-9


def test_the_budget_is_never_more_than_hides() -> None:
    """B·T·N/(2(N−1)), to a block."""
    for ring in (1.5, 3.0, 6.0):
        strategy = found(ring_s(TOTAL, 2) / ring)
        assert strategy.hidden[-1] == close(TOTAL / ring)
        assert sum(SIZES[i] for i in strategy.lates[-1]) <= strategy.hidden[-1]


def test_the_budget_follows_the_workers() -> None:
    """All get three times slower for a while: more hides. Then less again."""
    task = Many(sizes_kib=(300,) * 32)
    sizes = sizes_of(task)
    step_s = ring_s(sum(sizes), 2) / 4
    slow = Slowdown(workers=(0, 1), from_s=200 * step_s, until_s=480 * step_s, factor=3)
    strategy = Watched(**GRADIENT)
    play(cluster_of(step_s, step_s, slow=(slow,), forward_share=0.25), strategy, 200, task=task)
    bytes_late = [sum(sizes[i] for i in late) for late in strategy.lates]
    assert max(strategy.hidden) == pytest.approx(3 * sum(sizes) / 4, rel=0.01)
    assert strategy.hidden[-1] == pytest.approx(sum(sizes) / 4, rel=0.01)
    assert bytes_late[-1] == bytes_late[30] == 5 * sizes[0]
    assert max(bytes_late) == 14 * sizes[0], "2.8 times as much"


def test_the_slowest_worker_sets_the_budget_of_all() -> None:
    strategy = Watched(**GRADIENT)
    play(cluster_of(0.05, 0.2, 0.1, forward_share=0.25), strategy, 60, task=Steps(sizes_kib=(48,) * 10))
    for state in strategy.states:
        assert state.meter.compute_s == close(0.2)
        assert state.meter.bytes_per_s == pytest.approx(BYTES_PER_S, rel=1e-6)
        assert state.late == strategy.states[0].late != []


NETWORKS = [(0.0, 0.0, 2.0), (1e-4, 2e-4, 0.3), (5e-3, 1e-3, 0.3), (5e-3, 1e-3, 0.02)]


@pytest.mark.parametrize(("latency_s", "operation_s", "step_s"), NETWORKS)
@pytest.mark.parametrize("sizes_kib", [(16,) * 12, (512, 4, 64, 4), (1100, 200)], ids=str)
def test_it_is_never_much_slower_than_bsp(
    latency_s: float, operation_s: float, step_s: float, sizes_kib: tuple[int, ...]
) -> None:
    """At worst by an operation's latency a step, even where late blocks lie scattered among the others."""
    bits = 8 * BYTES_PER_S
    workers = Workers(count=3, step_s=step_s, up_bits_per_s=bits, down_bits_per_s=bits, latency_s=latency_s)
    cluster = Cluster(workers=(workers,), operation_s=operation_s, forward_share=0.33)
    steps = 20
    bsp = play(cluster, BSP(), steps, task=Steps(sizes_kib=sizes_kib))
    osp = play(cluster, OSP(growth=8, importance="random"), steps, task=Steps(sizes_kib=sizes_kib))
    assert osp.seconds <= (bsp.seconds + steps * (operation_s + 2 * 2 * latency_s)) * (1 + 1e-9)
