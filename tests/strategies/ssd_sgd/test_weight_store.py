"""SSD-SGD through a server: its rule worked out by hand, its equals, its bytes, and who may be missing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from offbeat import BSP, SSDSGD
from offbeat.worlds.virtual.cluster import Absence, ServerMachines
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from tests.support.ssd_sgd_runs import SIZE, WEIGHTS, Given, given_task, reference, run, same, shown
from tests.support.virtual_runs import BYTES_PER_S, Kept, close, cluster_of, play
from tests.support.virtual_servers import ONE_NIC, WIDE

pytestmark = pytest.mark.virtual


class Descending(Kept):
    """By torch's own SGD, which a server can take over."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr)


def point() -> Kept:
    return Descending(dimension=1 << 14)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(
    ("momentum", "decay", "scaling"), [(0.0, 0.0, None), (0.9, 0.1, None), (0.9, 0.1, 0.7)]
)
@pytest.mark.parametrize("server", [None, ONE_NIC, replace(WIDE, count=3)], ids=["beside", "one", "three"])
def test_every_weight_of_every_step(
    k: int, warmup: int, momentum: float, decay: float, scaling: float | None, server: ServerMachines | None
) -> None:
    strategy = SSDSGD(
        rule="authors", on="server", warmup=warmup, delay=k, alpha=1.5, beta=0.5, scaling=scaling
    )
    for world, every in ((2, 1), (3, 14)):
        task = given_task(momentum, decay)
        expected_loc, expected_glob = reference(strategy, task, 14, momentum, decay, world)
        w_loc, w_glob = run(strategy, task, 14, every, world, server)
        same(w_glob, shown(expected_glob, strategy, every))
        for ours, expected in zip(w_loc, expected_loc, strict=True):
            same(ours, expected)


@pytest.mark.parametrize("world", [2, 4])
def test_the_global_weights_are_those_of_the_collectives_bit_for_bit(world: int) -> None:
    strategy = SSDSGD(warmup=0, delay=2)
    ours, theirs = given_task(0.9, 0.1), given_task(0.9, 0.1)
    _, w_glob = run(replace(strategy, on="server"), ours, 11, world=world)
    _, expected = run(strategy, theirs, 11, world=world)
    assert all(map(torch.equal, w_glob, expected))


@pytest.mark.parametrize("server", [None, WIDE], ids=["beside", "own"])
def test_all_warm_up_is_bsp(server: ServerMachines | None) -> None:
    step_s = (1.0, 2.5)
    ours = play(cluster_of(*step_s, server=server), SSDSGD(on="server", warmup=20), 8, task=point())
    bsp = play(cluster_of(*step_s), BSP(), 8, task=point())
    assert all(map(torch.equal, ours.weights, bsp.weights))
    assert ours.history[-1].value == bsp.history[-1].value


@pytest.mark.parametrize("k", [1, 3])
def test_one_worker_is_the_plain_loop(k: int) -> None:
    ours = play(cluster_of(1.0), SSDSGD(on="server", warmup=1, delay=k), 11, task=point())
    plain = play(cluster_of(1.0), BSP(), 11, task=point())
    assert torch.equal(ours.weights[0], plain.weights[0])


# --- bytes and seconds


def test_bytes_are_those_of_the_weights_and_a_kth_of_them() -> None:
    k, steps, world = 5, 26, 4
    strategy = SSDSGD(on="server", warmup=0, delay=k)
    sent = play(cluster_of(*[1.0] * world, server=WIDE), strategy, steps, task=point()).each("bytes_sent")
    assert sent == [steps * WEIGHTS + (steps - 1) // k * REQUEST_BYTES] * world, "answers are the server's"
    sent = play(cluster_of(*[1.0] * world), strategy, steps, task=point()).each("bytes_left_host")
    pulls = (steps - 1) // k
    assert sent == [(world - 1) * ((steps + pulls) * WEIGHTS // world + pulls * REQUEST_BYTES)] * world


def test_pushes_hide_behind_the_next_step_and_the_slowest_sets_the_pace() -> None:
    push_s = WEIGHTS / BYTES_PER_S
    run = play(cluster_of(0.2, 0.3, server=WIDE), SSDSGD(on="server", warmup=0, delay=100), 10, task=point())
    assert run.seconds == close(10 * 0.3 + push_s), "what is under way in the end is waited for"
    assert run.ledgers[0].seconds == close(run.ledgers[1].seconds)
    exposed = play(
        cluster_of(0.01, 0.01, server=WIDE), SSDSGD(on="server", warmup=0, delay=100), 10, task=point()
    )
    assert exposed.seconds == close(0.01 + 10 * push_s)


# --- who is missing


def test_one_who_left_for_good_ends_no_run_and_counts_no_more() -> None:
    """Gradients of 1, 1 and 4: their mean is 2 with worker 2 and 1 without it."""
    away = (Absence(worker=2, from_s=2.5, until_s=math.inf),)
    ones = torch.ones(SIZE, dtype=torch.float64)
    task = Given(
        grads=lambda worker, _: ones * (4 if worker == 2 else 1),
        rates=lambda _: 0.5,
        make=lambda p: SGD(p, lr=0.5),
    )
    cluster = cluster_of(1.0, 1.0, 1.0, server=WIDE, away=away)
    run = play(cluster, SSDSGD(on="server", warmup=0, delay=2), 8, task=task)
    assert run.each("steps") == [8, 8, 3]
    same(task.w_glob[-1:], [-0.5 * (3 * 2 + 5 * 1) * ones])


def test_one_who_comes_back_joins_in() -> None:
    away = (Absence(worker=1, from_s=2.5, until_s=6.2),)
    cluster = cluster_of(1.0, 1.0, server=WIDE, away=away)
    run = play(cluster, SSDSGD(on="server", warmup=2, delay=2), 9, task=point())
    assert run.each("steps") == [9, 9]
    assert run.history[-1].step == 9
