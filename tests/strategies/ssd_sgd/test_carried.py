"""The rule that carries the optimizer's state, against a reference that has only the history of w_glob."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from offbeat import BSP, SSDSGD
from tests.support.ssd_sgd_runs import (
    SIZE,
    Elements,
    Given,
    Normalised,
    StepElements,
    carried_reference,
    halving,
    run,
    same,
    shown,
    varied,
)

pytestmark = pytest.mark.virtual

STEPS = 14
ZEROS = torch.zeros(SIZE, dtype=torch.float64)
ONES = torch.ones(SIZE, dtype=torch.float64)


def momentum(mu: float, decay: float = 0.0, nesterov: bool = False) -> StepElements:
    def step(at: Elements, grad: Tensor, rate: Tensor) -> Elements:
        grad = grad + decay * at["w"]
        m = mu * at["m"] + grad
        return {"w": at["w"] - rate * (grad + mu * m if nesterov else m), "m": m}

    return step


def adamw(decay: float = 0.01) -> StepElements:
    def step(at: Elements, grad: Tensor, rate: Tensor) -> Elements:
        n = at["n"] + 1
        m, v = 0.9 * at["m"] + 0.1 * grad, 0.999 * at["v"] + 0.001 * grad.square()
        w = at["w"] * (1 - rate * decay)
        return {
            "w": w - rate * (m / (1 - 0.9**n)) / ((v / (1 - 0.999**n)).sqrt() + 1e-8),
            "m": m,
            "v": v,
            "n": n,
        }

    return step


def elements(step: Any) -> Elements:
    names = ("w", "m", "v", "n") if "adamw" in step.__qualname__ else ("w", "m")
    return dict.fromkeys(names, ZEROS)


def check(
    strategy: SSDSGD, task: Given, step: StepElements, world: int, every: int = 1, **layout: Any
) -> None:
    expected_loc, expected_glob = carried_reference(
        strategy, task, STEPS, elements(step), step, world, **layout
    )
    w_loc, w_glob = run(strategy, task, STEPS, every, world)
    same(w_glob, shown(expected_glob, strategy, every))
    for ours, expected in zip(w_loc, expected_loc, strict=True):
        same(ours, expected)


OPTIMIZERS: dict[str, tuple[Any, StepElements]] = {
    "sgd": (lambda p: SGD(p, lr=1.0), momentum(0.0)),
    "momentum": (lambda p: SGD(p, lr=1.0, momentum=0.9, weight_decay=0.1), momentum(0.9, 0.1)),
    "nesterov": (lambda p: SGD(p, lr=1.0, momentum=0.9, nesterov=True), momentum(0.9, nesterov=True)),
    "adamw": (lambda p: AdamW(p, lr=1.0), adamw()),
}
PLACES = {
    "staggered": SSDSGD(staggered=True),
    "at once": SSDSGD(staggered=False),
    "server": SSDSGD(on="server"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("k", "world", "warmup", "every"), [(1, 2, 0, 1), (3, 4, 0, 14), (4, 2, 3, 14)])
def test_every_weight_of_every_step(
    place: str, optimizer: str, k: int, world: int, warmup: int, every: int
) -> None:
    """Rates differ from step to step. Looking once in a run leaves everything in the background."""
    make, step = OPTIMIZERS[optimizer]
    task = Given(grads=varied, rates=halving, make=make)
    check(replace(PLACES[place], delay=k, warmup=warmup), task, step, world, every)


@pytest.mark.parametrize("strategy", [SSDSGD(warmup=2, delay=3), SSDSGD(warmup=2, delay=3, staggered=False)])
def test_groups_with_learning_rates_of_their_own(strategy: SSDSGD) -> None:
    """Parts cut through parameters of three groups, with gaps behind two of them."""
    task = Given(
        grads=varied,
        rates=halving,
        make=lambda params: AdamW([{"params": [p]} for p in params], lr=1.0),
        numels=(11, 24, 13),
        factors=(1.0, 0.25, 3.0),
    )
    check(strategy, task, adamw(), 2, every=STEPS)


def test_parts_of_an_optimizer_that_needs_whole_parameters() -> None:
    """The last parameter lies first, and is the first worker's; by hand, parts 1, 1 and 2 of three."""
    numels = (8, 16, 24)

    def unit(at: Elements, grad: Tensor, rate: Tensor) -> Elements:
        parts = [part / part.norm() for part in grad.split(list(numels))]
        return {"w": at["w"] - rate * torch.cat(parts), "m": at["m"]}

    task = Given(grads=varied, rates=halving, make=lambda p: Normalised(p, lr=0.1), numels=numels)
    check(SSDSGD(warmup=0, delay=3), task, unit, 2, shares=(3, 3), phases=(2, 1, 1))


@pytest.mark.parametrize("strategy", [PLACES["at once"], PLACES["server"]], ids=["at once", "server"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_parameter_without_a_gradient(strategy: SSDSGD, optimizer: str) -> None:
    """Worker 1 lacks one in step 0 and for long, worker 0 in step 7, both in step 9. Counters are right.

    A counter belongs to a whole parameter, so each of two is owned by one worker.
    """
    without = {0: (1,), 2: (1,), 3: (1,), 7: (0,), 9: (0, 1)}
    make, step = OPTIMIZERS[optimizer]
    task = Given(
        grads=lambda worker, n: None if worker in without.get(n, ()) else varied(worker, n),
        rates=lambda _: 0.1,
        make=make,
        numels=(24, 24),
    )
    check(replace(strategy, warmup=0, delay=2, staggered=False), task, step, 2)


# --- what it equals


@pytest.mark.parametrize("strategy", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_data_on_all_workers_is_bsp(strategy: SSDSGD, optimizer: str) -> None:
    """Every local step is then the global one, and making it again changes nothing."""

    def alike(_: int, step: int) -> Tensor:
        return varied(0, step)

    make, _ = OPTIMIZERS[optimizer]
    tasks = [Given(grads=alike, rates=halving, make=make) for _ in range(2)]
    ours, _ = run(replace(strategy, warmup=1, delay=3), tasks[0], STEPS, STEPS, world=3)
    bsp, _ = run(BSP(), tasks[1], STEPS, STEPS, world=3)  # type: ignore[arg-type]
    for one, other in zip(ours, bsp, strict=True):
        same(one, other)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_is_the_plain_loop_bit_for_bit(optimizer: str, k: int) -> None:
    make, _ = OPTIMIZERS[optimizer]
    tasks = [Given(grads=varied, rates=halving, make=make) for _ in range(2)]
    ours, _ = run(SSDSGD(warmup=1, delay=k), tasks[0], STEPS, STEPS, world=1)
    plain, _ = run(BSP(), tasks[1], STEPS, STEPS, world=1)  # type: ignore[arg-type]
    assert torch.equal(torch.stack(ours[0]), torch.stack(plain[0]))


def test_amsgrad_and_numbers_of_pythons_own() -> None:
    """A state with three tensors, and one whose counter is an int: both arrive as they are."""

    class Counting(SGD):
        """w ← w − η n g, in the n-th step."""

        elementwise = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        state = self.state[param]
                        state["n"] = state.get("n", 0) + 1
                        param.sub_(param.grad, alpha=group["lr"] * state["n"])

    def counted(at: Elements, grad: Tensor, rate: Tensor) -> Elements:
        return {"w": at["w"] - rate * (at["m"] + 1) * grad, "m": at["m"] + 1}

    without = {2: (1,), 5: (0,), 6: (0,)}

    def grads(worker: int, n: int) -> Tensor | None:
        return None if worker in without.get(n, ()) else varied(worker, n)

    task = Given(grads=grads, rates=halving, make=lambda p: Counting(p, lr=1.0), numels=(24, 24))
    check(SSDSGD(warmup=0, delay=2, staggered=False), task, counted, 2)
    tasks = [Given(grads=varied, rates=halving, make=lambda p: Adam(p, lr=1.0, amsgrad=True)) for _ in "ab"]
    one, other = (
        run(SSDSGD(warmup=1, delay=3, staggered=each), task, STEPS)[1]
        for each, task in zip((True, False), tasks, strict=True)
    )
    assert all(map(torch.equal, one, other))
