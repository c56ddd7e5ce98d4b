"""SSD-SGD, gradient by gradient: its rule worked out by hand, its seconds and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from offbeat import BSP, SSDSGD
from offbeat.experiments.tasks.base import Batch, Data
from offbeat.worlds.virtual.cluster import ServerMachines
from offbeat.worlds.virtual.step_times import Trace
from tests.support.virtual_runs import BYTES_PER_S, Kept, close, cluster_of, play, ring_s

pytestmark = pytest.mark.virtual

SIZE = 48  # six alignments of float64: of two workers each owns three, of four they own 2, 2, 2 and none
WORLD = 2


class Normalised(Optimizer):
    """w ← w − η g/‖g‖: no piece of a parameter could be stepped without the rest of it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


@dataclass(frozen=True, kw_only=True)
class Given(Kept):
    """Gradients and learning rates as they are given, in float64; what workers saw stays at hand."""

    grads: Callable[[int, int], Any]  # of worker, in step
    rates: Callable[[int], float]
    make: Callable[[list[nn.Parameter]], Optimizer]
    numels: tuple[int, ...] = (SIZE,)
    factors: tuple[float, ...] = (1.0,)  # of the rates: one for all, or one for each parameter, then a group
    optimizers: list[Optimizer] = field(default_factory=list, compare=False)
    w_loc: list[list[Tensor]] = field(default_factory=list, compare=False)  # before each step of each worker
    w_glob: list[Tensor] = field(default_factory=list, compare=False)  # after each step

    def build(self) -> nn.Module:
        params = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in self.numels]
        self.built.append(nn.ParameterList(params))
        self.w_loc.append([])
        return self.built[-1]

    def optimizer(self, model: nn.Module) -> Optimizer:
        self.optimizers.append(self.make(list(model.parameters())))
        return self.optimizers[-1]

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        worker = next(i for i, built in enumerate(self.built) if built is model)
        step = len(self.w_loc[worker])
        self.w_loc[worker].append(_flat(model))
        for group, factor in zip(self.optimizers[worker].param_groups, self.factors, strict=True):
            group["lr"] = self.rates(step) * factor
        grad = self.grads(worker, step)
        if grad is not None:
            for param, part in zip(model.parameters(), grad.split(list(self.numels)), strict=True):
                param.grad = part.clone()
        return torch.zeros(())

    def evaluate(self, model: nn.Module, data: Data) -> float:
        self.w_glob.append(_flat(model))
        return 0.0


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach() for p in model.parameters()])


def varied(worker: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return torch.randn(SIZE, dtype=torch.float64, generator=generator)


def halving(step: int) -> float:
    return 0.1 * 0.5 ** (step // 2)


def given_task(momentum: float = 0.0, decay: float = 0.0) -> Given:
    return Given(
        grads=varied, rates=halving, make=lambda p: SGD(p, lr=1.0, momentum=momentum, weight_decay=decay)
    )


def run(
    strategy: SSDSGD,
    task: Given,
    steps: int,
    evaluate_every: int = 1,
    world: int = WORLD,
    server: ServerMachines | None = None,
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """w_loc of each worker before each step and after the last, and w_glob as often as it was looked at."""
    cluster = cluster_of(*[1.0] * world, server=server)
    play(cluster, strategy, steps, task=task, evaluate_every=evaluate_every)
    start = torch.zeros(SIZE, dtype=torch.float64)
    return [[*seen, _flat(model)] for seen, model in zip(task.w_loc, task.built, strict=True)], [
        start,
        *task.w_glob,
    ]


def layout(
    task: Given, strategy: SSDSGD, world: int, shares: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    """Of each element, its owner, and in which step modulo k it is pulled: cut by hand, in lines of 8.

    In the flat weights parameters lie in backward order, each from a line's beginning on. `shares` says how
    many lines each worker owns, where they are not even.
    """
    at, lines = [], 0
    for numel in reversed(task.numels):
        at.append(torch.arange(numel) // 8 + lines)
        lines += -(-numel // 8)
    line = torch.cat(at[::-1])
    sizes = torch.tensor(shares or [-(-lines // world)] * world)
    ends = sizes.cumsum(0)
    owner = torch.bucketize(line, ends, right=True)
    inside = line - (ends - sizes)[owner]
    among = strategy.delay if strategy.staggered else 1
    passed = [inside >= sizes[owner] * (part + 1) // among for part in range(among)]
    return owner, torch.stack(passed).sum(0)


def same(ours: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(torch.stack(ours), torch.stack(expected), rtol=1e-12, atol=1e-12)


# --- the rule


@pytest.mark.parametrize("k", [1, 3, 4])
def test_constant_gradients_in_closed_form(k: int) -> None:
    """Worker r's gradient is c_r, plain SGD: over two periods everything can be written down."""
    rate, alpha, beta = 0.1, 1.5, 0.5
    c = [varied(0, 0), varied(1, 0)]
    mean = (c[0] + c[1]) / 2
    steps = 2 * k + 4
    task = Given(grads=lambda worker, _: c[worker], rates=lambda _: rate, make=lambda p: SGD(p, lr=rate))
    w_loc, w_glob = run(SSDSGD(warmup=0, delay=k, alpha=alpha, beta=beta, staggered=False), task, steps)
    same(w_glob, [-rate * n * mean for n in range(steps + 1)])
    for worker in range(WORLD):
        expected = []
        for n in range(steps + 1):  # after n steps
            pulls = max(0, n - 2) // k  # the pull that follows step mk − 1 is used in step mk + 1
            had = torch.full((SIZE,), float(pulls * k), dtype=torch.float64)  # pushes that it brought
            if pulls:  # its own share lies here; the others' are moved on by g_sync, the mean gradient
                had += 1
            since = n - pulls * k - 1 if pulls else n  # g_sync is the mean gradient itself
            sync = mean if pulls else torch.zeros(SIZE, dtype=torch.float64)
            expected.append(-rate * (had * mean + since * (alpha * c[worker] + beta * sync)))
        same(w_loc[worker], expected)


def reference(
    strategy: SSDSGD,
    task: Given,
    steps: int,
    momentum: float,
    decay: float,
    world: int = WORLD,
    w_glob: list[Tensor] | None = None,
    shares: tuple[int, ...] | None = None,
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The rule, from the history of w_glob alone: no push is ever under way here.

    `w_glob` is that history, where it is not momentum SGD's.
    """
    k, zeros = strategy.delay, torch.zeros(SIZE, dtype=torch.float64)
    owner, phase = layout(task, strategy, world, shares)
    grads = [[task.grads(worker, n) for n in range(steps)] for worker in range(world)]
    numels = torch.tensor(task.numels if len(task.factors) > 1 else [SIZE])
    factors = torch.tensor(task.factors, dtype=torch.float64).repeat_interleave(numels)
    etas = [task.rates(n) * factors for n in range(steps)]
    if w_glob is None:
        w_glob, buffer = [zeros], zeros
        for n in range(steps):
            buffer = momentum * buffer + sum(each[n] for each in grads) / world + decay * w_glob[-1]
            w_glob.append(w_glob[-1] - etas[n] * buffer)
    w_loc: list[list[Tensor]] = []
    for worker in range(world):
        w, sync, seen = zeros, zeros, [zeros]

        def local(w: Tensor, n: int, worker: int = worker) -> Tensor:
            alpha = max(1.0, min(k, 0.5 / (1 - momentum))) if strategy.alpha is None else strategy.alpha
            change = alpha * grads[worker][n] + decay * w + strategy.beta * sync  # noqa: B023
            return w - etas[n] * change

        for n in range(steps):
            t = n - strategy.warmup
            if t > 1:
                came = phase == (t - 1) % k
                last = n - 1  # pushes in this pull, and in the one before
                before = max(last - k, strategy.warmup)  # or at the end of the warm-up
                moved = (w_glob[before] - w_glob[last]) / (strategy.scaling or sum(etas[before:last]))
                sync = torch.where(came, moved, sync)
                if strategy.on == "server":  # its own last step is not in what it pulled
                    caught_up = local(w_glob[last], n - 1)
                else:
                    caught_up = w_glob[last] - etas[n - 1] * sync  # moved on by a step
                    caught_up = torch.where(owner == worker, w_glob[n], caught_up)
                w = torch.where(came, caught_up, w)
            w = w_glob[n + 1] if t < 0 else local(w, n)
            seen.append(w)
        w_loc.append(seen)
    return w_loc, w_glob


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.1)])
@pytest.mark.parametrize(("scaling", "evaluate_every"), [(None, 1), (None, 14), (0.7, 14)])
def test_every_weight_of_every_step(
    k: int, warmup: int, momentum: float, decay: float, scaling: float | None, evaluate_every: int
) -> None:
    """Gradients and learning rates that differ from step to step; momentum and decay, or neither.

    Looking at w_glob after each step brings every push in early; looking once leaves them in the background.
    """
    task = given_task(momentum, decay)
    alpha = 1.5 if evaluate_every == 1 else None
    strategy = SSDSGD(warmup=warmup, delay=k, alpha=alpha, beta=0.5, scaling=scaling, staggered=False)
    expected_loc, expected_glob = reference(strategy, task, 14, momentum, decay)
    w_loc, w_glob = run(strategy, task, 14, evaluate_every)
    same(w_glob, expected_glob[::evaluate_every])
    for worker in range(WORLD):
        same(w_loc[worker], expected_loc[worker])


@pytest.mark.parametrize(
    "strategy",
    [
        SSDSGD(warmup=2, delay=100, staggered=False),
        SSDSGD(warmup=2, delay=3),
        SSDSGD(on="server", warmup=2, delay=3),
    ],
    ids=str,
)
def test_a_parameter_without_gradient_keeps_still_and_the_others_gradient_counts_half(
    strategy: SSDSGD,
) -> None:
    """Weight decay is on. Worker 1 lacks a gradient in step 4, worker 0 in step 7, both in step 6."""
    ones = torch.ones(SIZE, dtype=torch.float64)
    without = {4: (1,), 6: (0, 1), 7: (0,)}
    task = Given(
        grads=lambda worker, step: None if worker in without.get(step, ()) else ones,
        rates=lambda _: 0.5,
        make=lambda p: SGD(p, lr=0.5, weight_decay=0.5),
    )
    w_loc, w_glob = run(strategy, task, 10)
    expected = [torch.zeros(SIZE, dtype=torch.float64)]
    for step in range(10):
        share = 1 - len(without.get(step, ())) / 2
        w = expected[-1]
        expected.append(w - 0.5 * (share * ones + 0.5 * w) if share else w)
    same(w_glob, expected)
    for step, workers in without.items() if strategy.delay == 100 else ():  # where nothing is pulled
        for worker in range(WORLD):
            still = torch.equal(w_loc[worker][step], w_loc[worker][step + 1])
            assert still == (worker in workers)


# --- shares of whole parameters


def test_an_optimizer_that_needs_whole_parameters_gets_them() -> None:
    numels = (8, 16, 24)
    task = Given(grads=varied, rates=lambda _: 0.1, make=lambda p: Normalised(p, lr=0.1), numels=numels)
    w_loc, w_glob = run(SSDSGD(warmup=0, delay=2, alpha=1.0, staggered=False), task, 9)
    expected = [torch.zeros(SIZE, dtype=torch.float64)]
    for n in range(9):
        mean = (varied(0, n) + varied(1, n)) / 2
        unit = torch.cat([part / part.norm() for part in mean.split(list(numels))])
        expected.append(expected[-1] - 0.1 * unit)
    same(w_glob, expected)
    assert not torch.equal(w_loc[0][-1], w_loc[1][-1])


def test_bytes_of_whole_parameters() -> None:
    """Of 8, 16 and 24 elements one worker owns the last, which backward completes first, one the others."""
    strategy = SSDSGD(warmup=0, delay=2, staggered=False)
    numels = (8, 16, 24)
    task = Given(grads=varied, rates=lambda _: 0.1, make=lambda p: Normalised(p, lr=0.1), numels=numels)
    sent = play(cluster_of(1.0, 1.0), strategy, 8, task=task).each("bytes_sent")
    # pushes carry two marks a share; pulls start in steps 2, 4 and 6
    assert sent == [8 * (8 * (24 + 2)) + 3 * 8 * 24] * 2
    task = Given(grads=varied, rates=lambda _: 0.1, make=lambda p: Normalised(p, lr=0.1), numels=(40, 8))
    sent = play(cluster_of(1.0, 1.0), strategy, 8, task=task).each("bytes_sent")
    assert sent == [8 * 8 * (40 + 1) + 3 * 8 * 8, 8 * 8 * (8 + 1) + 3 * 8 * 40]


# --- seconds and bytes


WEIGHTS = 4 << 14
SHARE, MARK = WEIGHTS // 4, 4


def point() -> Kept:
    return Kept(dimension=1 << 14)


def test_bytes_are_those_of_the_weights_and_a_kth_of_them() -> None:
    k, steps = 5, 26
    sent = play(cluster_of(*[1.0] * 4), SSDSGD(warmup=0, delay=k, staggered=False), steps, task=point()).each(
        "bytes_sent"
    )
    assert sent == [3 * (steps * (SHARE + MARK) + (steps - 1) // k * SHARE)] * 4
    assert sent[0] == pytest.approx((steps + 5) * WEIGHTS * 3 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("step_s", "hidden"), [(0.11, "all"), (0.06, "pushes"), (0.01, "nothing")], ids=lambda value: str(value)
)
def test_seconds(step_s: float, hidden: str) -> None:
    """A push (0.049 s) has the next step to hide behind; every k steps a pull travels before it."""
    k, steps = 3, 13
    run = play(cluster_of(*[step_s] * 4), SSDSGD(warmup=0, delay=k, staggered=False), steps, task=point())
    push_s, pull_s = 3 * (SHARE + MARK) / BYTES_PER_S, 3 * SHARE / BYTES_PER_S
    flying_s = [push_s + pull_s if t and t % k == 0 else push_s for t in range(steps)]
    assert run.seconds == close(step_s + sum(max(step_s, s) for s in flying_s[:-1]) + flying_s[-1])
    a_step_s = sum(max(step_s, s) for s in flying_s[1 : k + 1]) / k
    if hidden == "all":
        assert a_step_s == close(step_s)
    elif hidden == "nothing":
        assert a_step_s == pytest.approx(ring_s(WEIGHTS, 4) * (1 + 1 / k) / 2, rel=1e-3)


def test_the_warm_up_takes_as_long_as_bsp() -> None:
    bsp, ours = (play(cluster_of(1.0, 2.0), s, 6, task=point()) for s in (BSP(), SSDSGD(warmup=6)))
    assert ours.seconds == bsp.seconds
    assert ours.each("bytes_sent") == bsp.each("bytes_sent")
    assert all(map(torch.equal, ours.weights, bsp.weights))


@pytest.mark.parametrize(
    "strategy", [SSDSGD(warmup=0), SSDSGD(on="server", warmup=1)], ids=lambda strategy: strategy.on
)
@given(
    traces=st.lists(st.lists(st.floats(0.001, 2.0), min_size=1, max_size=4), min_size=2, max_size=4),
    k=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_nobody_is_more_than_one_step_ahead(strategy: SSDSGD, traces: list[list[float]], k: int) -> None:
    begun = [0] * len(traces)

    def grads(worker: int, step: int) -> Tensor:
        begun[worker] = step + 1
        assert max(begun) - min(begun) <= 1 or step == 0
        return torch.ones(SIZE, dtype=torch.float64)

    task = Given(grads=grads, rates=lambda _: 0.1, make=lambda p: SGD(p, lr=0.1))
    cluster = cluster_of(*(Trace(trace_s=tuple(trace)) for trace in traces))
    play(cluster, replace(strategy, delay=k), 9, task=task)
    assert begun == [9] * len(traces)
