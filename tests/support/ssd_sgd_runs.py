"""SSD-SGD in virtual time with given gradients, and its rule computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from offbeat import SSDSGD
from offbeat.experiments.tasks.base import Batch, Data
from offbeat.worlds.virtual.cluster import ServerMachines
from tests.support.virtual_runs import Kept, cluster_of, play

SIZE = 48  # six alignments of float64: of two workers each owns three, of four they own 2, 2, 2 and none
WORLD = 2


class Normalised(Optimizer):
    """w ← w − η g/‖g‖: no piece of a parameter could be stepped without the rest of it."""

    linear_rate = True

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
    made: list[Optimizer] = field(default_factory=list, compare=False)
    w_loc: list[list[Tensor]] = field(default_factory=list, compare=False)  # before each step of each worker
    w_glob: list[Tensor] = field(default_factory=list, compare=False)  # after each step

    def build(self) -> nn.Module:
        params = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in self.numels]
        self.built.append(nn.ParameterList(params))
        self.w_loc.append([])
        return self.built[-1]

    def optimizer(self, model: nn.Module) -> Optimizer:
        self.made.append(self.make(list(model.parameters())))
        return self.made[-1]

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        worker = next(i for i, built in enumerate(self.built) if built is model)
        step = len(self.w_loc[worker])
        self.w_loc[worker].append(flat(model))
        for group, factor in zip(self.made[worker].param_groups, self.factors, strict=True):
            group["lr"] = self.rates(step) * factor
        grad = self.grads(worker, step)
        if grad is not None:
            for param, part in zip(model.parameters(), grad.split(list(self.numels)), strict=True):
                param.grad = part.clone()
        return torch.zeros(())

    def evaluate(self, model: nn.Module, data: Data) -> float:
        self.w_glob.append(flat(model))
        return 0.0


def flat(model: nn.Module) -> Tensor:
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
    return [[*seen, flat(model)] for seen, model in zip(task.w_loc, task.built, strict=True)], [
        start,
        *task.w_glob,
    ]


def layout(
    task: Given,
    strategy: SSDSGD,
    world: int,
    shares: tuple[int, ...] | None,
    phases: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Of each element, its owner, and in which step modulo k it is pulled: cut by hand, in lines of 8.

    In the flat weights parameters lie in backward order, each from a line's beginning on. `shares` says how
    many lines each worker owns, where they are not even; `phases` in which step each parameter is pulled,
    where parts are of whole parameters.
    """
    at, lines = [], 0
    for numel in reversed(task.numels):
        at.append(torch.arange(numel) // 8 + lines)
        lines += -(-numel // 8)
    line = torch.cat(at[::-1])
    sizes = torch.tensor(shares or [-(-lines // world)] * world)
    ends = sizes.cumsum(0)
    owner = torch.bucketize(line, ends, right=True)
    if phases is not None:
        return owner, torch.tensor(phases).repeat_interleave(torch.tensor(task.numels))
    inside = line - (ends - sizes)[owner]
    among = strategy.parts
    passed = [inside >= sizes[owner] * (part + 1) // among for part in range(among)]
    return owner, torch.stack(passed).sum(0)


def same(ours: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(torch.stack(ours), torch.stack(expected), rtol=1e-12, atol=1e-12)


def rates_of(task: Given, steps: int) -> list[Tensor]:
    """The learning rate of each element in each step."""
    numels = torch.tensor(task.numels if len(task.factors) > 1 else [SIZE])
    factors = torch.tensor(task.factors, dtype=torch.float64).repeat_interleave(numels)
    return [task.rates(n) * factors for n in range(steps)]


def reference(
    strategy: SSDSGD,
    task: Given,
    steps: int,
    momentum: float,
    decay: float,
    world: int = WORLD,
    w_glob: list[Tensor] | None = None,
    shares: tuple[int, ...] | None = None,
    phases: tuple[int, ...] | None = None,
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The authors' rule, from the history of w_glob alone: no push is ever under way here.

    `w_glob` is that history, where it is not momentum SGD's.
    """
    k, zeros = strategy.delay, torch.zeros(SIZE, dtype=torch.float64)
    _, phase = layout(task, strategy, world, shares, phases)
    grads = [[task.grads(worker, n) for n in range(steps)] for worker in range(world)]
    etas = rates_of(task, steps)
    beta = 0.5 if strategy.beta is None else strategy.beta
    alpha = (1 - beta) / (1 - momentum) if strategy.alpha is None else strategy.alpha
    if w_glob is None:
        w_glob, buffer = [zeros], zeros
        for n in range(steps):
            buffer = momentum * buffer + sum(each[n] for each in grads) / world + decay * w_glob[-1]
            w_glob.append(w_glob[-1] - etas[n] * buffer)
    w_loc: list[list[Tensor]] = []
    for worker in range(world):
        w, sync, seen = zeros, zeros, [zeros]
        for n in range(steps):
            t = n - strategy.warmup
            if t > 0:
                came = phase == t % k
                before = max(n - k, strategy.warmup)  # pushes in the pull before, or in the warm-up
                moved = (w_glob[before] - w_glob[n]) / (strategy.scaling or sum(etas[before:n]))
                sync = torch.where(came, moved, sync)
                w = torch.where(came, w_glob[n], w)
            change = alpha * grads[worker][n] + decay * w + beta * sync
            w = w_glob[n + 1] if t < 0 else w - etas[n] * change
            seen.append(w)
        w_loc.append(seen)
    return w_loc, w_glob


def shown(w_glob: list[Tensor], strategy: SSDSGD, every: int) -> list[Tensor]:
    """The start, and w_glob as evaluations see it: without the push in flight, but in the warm-up and at the
    end."""
    steps = len(w_glob) - 1
    complete = [n if n <= strategy.warmup or n == steps else n - 1 for n in range(every, steps + 1, every)]
    return [w_glob[0], *(w_glob[n] for n in complete)]


Elements = dict[str, Tensor]  # weights and state, each with a value per element, counters too
StepElements = Callable[[Elements, Tensor, Tensor], Elements]  # with a gradient, at a rate


def carried_reference(
    strategy: SSDSGD,
    task: Given,
    steps: int,
    start: Elements,
    step: StepElements,
    world: int = WORLD,
    shares: tuple[int, ...] | None = None,
    phases: tuple[int, ...] | None = None,
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The rule that carries the optimizer's state, from the history of w_glob and its state alone."""
    owner, phase = layout(task, strategy, world, shares, phases)
    etas = rates_of(task, steps)
    zeros = torch.zeros(SIZE, dtype=torch.float64)

    def stepped(elements: Elements, grad: Tensor | None, n: int) -> Elements:
        return elements if grad is None else step(elements, grad, etas[n])

    def mean(n: int) -> Tensor | None:
        grads = [task.grads(worker, n) for worker in range(world)]
        if all(grad is None for grad in grads):
            return None
        return sum((zeros if grad is None else grad for grad in grads), zeros) / world

    glob = [start]
    for n in range(steps):
        glob.append(stepped(glob[-1], mean(n), n))
    w_loc = []
    for worker in range(world):
        local, seen = start, [start["w"]]
        for n in range(steps):
            t = n - strategy.warmup
            if t > 1:  # the pull of step t − 1, which lacks that step, is used
                came = phase == (t - 1) % strategy.delay
                redone = stepped(glob[n - 1], task.grads(worker, n - 1), n - 1)
                own = (owner == worker) & (strategy.on == "collectives")
                fresh = {name: torch.where(own, glob[n][name], redone[name]) for name in start}
                local = {name: torch.where(came, fresh[name], local[name]) for name in start}
            local = glob[n + 1] if t < 0 else stepped(local, task.grads(worker, n), n)
            seen.append(local["w"])
        w_loc.append(seen)
    return w_loc, [each["w"] for each in glob]


WEIGHTS = 4 << 14


def point() -> Kept:
    return Kept(dimension=1 << 14)
