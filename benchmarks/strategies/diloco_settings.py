"""How many steps does DiLoCo need, by its period, delay, outer learning rate, and by what is published?

    python -m benchmarks.diloco_settings --data FOLDER [--seeds 16]

The Fashion-MNIST MLP of `benchmarks/peers` to 87%, 4 workers, batches of 32, by other seeds. All settings of
a period and a delay, and all seeds, train at once as one batch of matrices, which takes a GPU: the rule is
written out again here, and a test holds it against `DiLoCo` in virtual time. A row has the best outer
learning rate of those tried, and tells how many steps it took in the mean of the seeds, looked at every 25;
a run that did not get there in 1100 counts as 1500; final is the mean accuracy after 1100. Outer momentum is
0.9. Besides the plain rule there are
    average  what is published is a moving mean of w_global: β
and, where a fragment is merged,
    carry    what a worker has done while it travelled is kept: w_i ← w_global + (w_i − w_i when it was sent)
    mix      half of it: α = 0.5
    damp     the inner optimizer's momentum is halved
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.tables import Table
from offbeat.sampling import batches
from offbeat.tasks import task
from offbeat.tasks.images import Images

WORKERS, BATCH, STEPS, LOOK, FIRST, TARGET, NEVER = 4, 32, 1100, 25, 200, 0.87, 1500
LR, MOMENTUM, OUTER_MOMENTUM = 0.02, 0.9, 0.9
RATES = (0.3, 0.4, 0.47, 0.55, 0.7, 0.85)
PERIODS, DELAYS = (8, 16, 24, 32, 64), (0, 2, 4, 8)
AVERAGES, AVERAGED = (0.5, 0.7, 0.8), ((16, 0), (16, 4), (24, 0), (24, 4), (32, 0), (32, 4), (64, 0), (64, 8))
SIDEWAYS = ((16, 4), (32, 8))  # period and delay where other ways to merge were tried


@dataclass(frozen=True, kw_only=True)
class Settings:
    outer_lr: float
    average: float = 0.0
    carry: bool = False
    mix: float = 0.0
    damp: float = 1.0


@dataclass
class Many:
    """Runs of several settings with several seeds, at once. Tensors begin with (settings, seeds, workers)."""

    data: Images
    seeds: Sequence[int]
    settings: Sequence[Settings]
    period: int
    delay: int

    def __post_init__(self) -> None:
        self.task = task("fashion-mnist", model="mlp", batch_size=BATCH)
        self.images, self.targets = self.data.train[0].flatten(1), self.data.train[1]
        self.order = torch.stack([self._batches(seed) for seed in self.seeds], dim=1).to(self.images.device)
        starts = [self._start(seed) for seed in self.seeds]
        count = len(self.settings)
        self.w_global = [
            torch.stack(same).to(self.images.device).repeat(count, *[1] * (same[0].dim() + 1))[:, :, None]
            for same in zip(*starts, strict=True)
        ]
        self.published = [w.clone() for w in self.w_global]
        self.velocity = [torch.zeros_like(w) for w in self.w_global]
        self.weights = [w.repeat_interleave(WORKERS, dim=2).requires_grad_() for w in self.w_global]
        self.momentum = [torch.zeros_like(w) for w in self.weights]
        self.sent: list[Tensor] = []

    def _batches(self, seed: int) -> Tensor:
        samples = len(self.data)
        orders = [batches(samples, rank, WORKERS, BATCH, seed) for rank in range(WORKERS)]
        return torch.stack([torch.stack([next(order) for order in orders]) for _ in range(STEPS)])

    def _start(self, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [parameter.detach() for parameter in self.task.build().parameters()]

    def run(self) -> tuple[Tensor, Tensor]:
        """Steps to the target, and the accuracy in the end, for each of the settings and each seed."""
        first = torch.full((len(self.settings), len(self.seeds)), NEVER, device=self.images.device)
        for step in range(1, STEPS + 1):
            self.step(step)
            if step >= FIRST and step % LOOK == 0:
                first = torch.where(self.accuracy() >= TARGET, first.clamp(max=step), first)
        return first.cpu().double(), self.accuracy().cpu()

    def step(self, step: int) -> None:
        chosen = self.order[step - 1]
        inputs = self.images[chosen].expand(len(self.settings), *chosen.shape, -1)
        targets = self.targets[chosen].expand(len(self.settings), *chosen.shape)
        out = forward(inputs, self.weights)
        loss = functional.cross_entropy(out.flatten(0, -2), targets.flatten(), reduction="sum") / BATCH
        gradients = torch.autograd.grad(loss, self.weights)
        with torch.no_grad():
            torch._foreach_mul_(self.momentum, MOMENTUM)
            torch._foreach_add_(self.momentum, gradients)
            torch._foreach_add_(self.weights, self.momentum, alpha=-LR)
            if (step + self.delay) % self.period == 0:
                self.sent = [weight.detach().clone() for weight in self.weights]
            if step % self.period == 0:
                self.merge(step // self.period)

    def merge(self, turns: int) -> None:
        for i, (weight, w_global) in enumerate(zip(self.weights, self.w_global, strict=True)):
            velocity, ahead = self.velocity[i], self.sent[i].mean(2, keepdim=True) - w_global
            velocity.mul_(OUTER_MOMENTUM).add_(ahead)
            w_global.add_(self.each("outer_lr", weight) * (ahead + OUTER_MOMENTUM * velocity))
            average = self.each("average", weight)
            self.published[i].lerp_(w_global, (1 - average) / (1 - average**turns))
            merged = w_global + self.each("carry", weight) * (weight - self.sent[i])
            weight.copy_(torch.lerp(merged, weight, self.each("mix", weight)))
            self.momentum[i].mul_(self.each("damp", weight))

    def each(self, name: str, like: Tensor) -> Tensor:
        """A setting of all runs, to multiply such a tensor with."""
        values = [float(getattr(settings, name)) for settings in self.settings]
        return torch.tensor(values, device=like.device).view(-1, *[1] * (like.dim() - 1))

    def accuracy(self) -> Tensor:
        """Of what is published."""
        inputs, targets = self.data.test[0].flatten(1), self.data.test[1]
        hits = torch.zeros(len(self.settings), len(self.seeds), device=inputs.device)
        for part, right in zip(inputs.split(2000), targets.split(2000), strict=True):
            shape = (len(self.settings), len(self.seeds), 1, *part.shape)
            with torch.no_grad():
                hits += (forward(part.expand(shape), self.published).argmax(-1) == right).sum((2, 3))
        return hits / len(targets)


def forward(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    for layer in range(0, len(weights), 2):
        inputs = functional.relu(inputs) if layer else inputs
        inputs = inputs @ weights[layer].transpose(-1, -2) + weights[layer + 1].unsqueeze(-2)
    return inputs


def best(table: Table, data: Images, seeds: Sequence[int], period: int, delay: int, **how: float) -> None:
    """A row: the outer learning rate that took the fewest steps."""
    settings = [Settings(outer_lr=rate, **how) for rate in RATES]  # type: ignore[arg-type]
    steps, final = Many(data, seeds, settings, period, delay).run()
    fewest = int(steps.mean(1).argmin())
    found = steps[fewest]
    table.row(
        str(period),
        str(delay),
        ", ".join(f"{name} {value:g}" for name, value in how.items()),
        f"{RATES[fewest]:g}",
        f"{found.mean():.0f}",
        f"{found.std() / len(seeds) ** 0.5:.0f}",
        str(int((found == NEVER).sum())),
        f"{final[fewest].mean():.4f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("OFFBEAT_DATA"), help="the data sets")
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    data = task("fashion-mnist", model="mlp", batch_size=BATCH).load(options.data).to(device)
    assert isinstance(data, Images)
    seeds = range(10, 10 + options.seeds)  # others than those of the tables they are to help
    columns = ["period", "delay", "besides", "best outer lr", "steps", "± (standard error)"]
    columns += ["not there", "final"]
    table = Table("diloco-settings", __doc__ or "", columns)
    table.note(f"{options.seeds} seeds, outer learning rates {', '.join(f'{rate:g}' for rate in RATES)}")
    for period in PERIODS:
        for delay in (delay for delay in DELAYS if 2 * delay <= period):
            best(table, data, seeds, period, delay)
    for period, delay in AVERAGED:
        for average in AVERAGES:
            best(table, data, seeds, period, delay, average=average)
    for period, delay in SIDEWAYS:
        best(table, data, seeds, period, delay, carry=True)
        best(table, data, seeds, period, delay, mix=0.5)
        best(table, data, seeds, period, delay, damp=0.5)
    table.write()


if __name__ == "__main__":
    main()
