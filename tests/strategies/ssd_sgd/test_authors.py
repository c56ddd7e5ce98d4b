"""The authors' rule, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD

from offbeat import SSDSGD
from tests.support.ssd_sgd_runs import SIZE, WORLD, Given, given_task, reference, run, same, shown, varied

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("k", [1, 3, 4])
def test_constant_gradients_in_closed_form(k: int) -> None:
    """Worker r's gradient is c_r, plain SGD: over two periods everything can be written down."""
    rate, alpha, beta = 0.1, 1.5, 0.5
    c = [varied(0, 0), varied(1, 0)]
    mean = (c[0] + c[1]) / 2
    steps = 2 * k + 4
    task = Given(grads=lambda worker, _: c[worker], rates=lambda _: rate, make=lambda p: SGD(p, lr=rate))
    strategy = SSDSGD(rule="authors", warmup=0, delay=k, alpha=alpha, beta=beta, staggered=False)
    w_loc, w_glob = run(strategy, task, steps)
    same(w_glob, shown([-rate * n * mean for n in range(steps + 1)], strategy, 1))
    for worker in range(WORLD):
        expected = []
        for n in range(steps + 1):  # after n steps
            pulls = max(0, n - 1) // k  # the pull that follows step mk − 1 is used in step mk
            since = n - pulls * k  # g_sync is the mean gradient itself
            sync = mean if pulls else torch.zeros(SIZE, dtype=torch.float64)
            expected.append(-rate * (pulls * k * mean + since * (alpha * c[worker] + beta * sync)))
        same(w_loc[worker], expected)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.1)])
@pytest.mark.parametrize(("scaling", "evaluate_every"), [(None, 1), (None, 14), (0.7, 14)])
def test_every_weight_of_every_step(
    k: int, warmup: int, momentum: float, decay: float, scaling: float | None, evaluate_every: int
) -> None:
    """Gradients and learning rates that differ from step to step; momentum and decay, or neither.

    Looking at w_glob after each step leaves every push in the background, as looking once does.
    """
    task = given_task(momentum, decay)
    alpha = 1.5 if evaluate_every == 1 else None
    strategy = SSDSGD(rule="authors", warmup=warmup, delay=k, alpha=alpha, scaling=scaling, staggered=False)
    expected_loc, expected_glob = reference(strategy, task, 14, momentum, decay)
    w_loc, w_glob = run(strategy, task, 14, evaluate_every)
    same(w_glob, shown(expected_glob, strategy, evaluate_every))
    for worker in range(WORLD):
        same(w_loc[worker], expected_loc[worker])
