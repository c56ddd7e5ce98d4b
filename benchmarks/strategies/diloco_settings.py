"""Which settings of DiLoCo need the fewest steps?

    python -m benchmarks run diloco_settings --data FOLDER [--seeds 16]

The Fashion-MNIST MLP of `benchmarks/peers` to 87%, four workers, batches of 32, with other seeds than there.
For each period and delay, all settings and seeds train at once as one batch of matrices, which needs a GPU.
DiLoCo's rule is implemented again for this; a test compares it with `DiLoCo` in virtual time.

A row shows the best outer learning rate of those tried, and its steps to the target: the mean of the seeds,
evaluated every 25 steps; a run that misses the target in 1100 steps counts as 1500. "final" is the mean
accuracy after 1100 steps. Outer momentum is 0.9. Variants of the rule:
    average  evaluate a moving mean of w_global with this decay
    carry    when a fragment is merged, keep the steps taken since it was sent:
             w_i ← w_global + (w_i − w_i when it was sent)
    mix      when a fragment is merged, keep this fraction of w_i
    damp     when a fragment is merged, multiply the inner optimizer's momentum by this
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table
from offbeat.data.batching import batches
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.images import Images

WORKERS, BATCH, STEPS, TARGET = 4, 32, 1100, 0.87
EVALUATE_FROM, EVALUATE_EVERY = 200, 25  # steps
MISSED = 1500  # steps that a run counts as if it misses the target
LR, MOMENTUM, OUTER_MOMENTUM = 0.02, 0.9, 0.9
RATES = (0.3, 0.4, 0.47, 0.55, 0.7, 0.85)
PERIODS, DELAYS = (8, 16, 24, 32, 64), (0, 2, 4, 8)
AVERAGES = (0.5, 0.7, 0.8)
AVERAGED = ((16, 0), (16, 4), (24, 0), (24, 4), (32, 0), (32, 4), (64, 0), (64, 8))
MERGE_VARIANTS = ((16, 4), (32, 8))  # period and delay with which carry, mix and damp are tried


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Outer learning rate, and the variants of the rule."""

    outer_lr: float
    average: float = 0.0
    carry: bool = False
    mix: float = 0.0
    damp: float = 1.0


@dataclass
class BatchedRuns:
    """Runs with several settings and seeds, trained at once; tensors are (settings, seeds, workers, …)."""

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
        """Train; return the steps to the target and the final accuracy, by settings and seed."""
        first = torch.full((len(self.settings), len(self.seeds)), MISSED, device=self.images.device)
        for step in range(1, STEPS + 1):
            self.step(step)
            if step >= EVALUATE_FROM and step % EVALUATE_EVERY == 0:
                first = torch.where(self.accuracy() >= TARGET, first.clamp(max=step), first)
        return first.cpu().double(), self.accuracy().cpu()

    def step(self, step: int) -> None:
        """Take one inner step of all workers of all runs, and merge if a period ends."""
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
        """Take the `turns`-th outer step and give the result to the workers."""
        for i, (weight, w_global) in enumerate(zip(self.weights, self.w_global, strict=True)):
            velocity, ahead = self.velocity[i], self.sent[i].mean(2, keepdim=True) - w_global
            velocity.mul_(OUTER_MOMENTUM).add_(ahead)
            w_global.add_(self.per_run("outer_lr", weight) * (ahead + OUTER_MOMENTUM * velocity))
            average = self.per_run("average", weight)
            self.published[i].lerp_(w_global, (1 - average) / (1 - average**turns))
            merged = w_global + self.per_run("carry", weight) * (weight - self.sent[i])
            weight.copy_(torch.lerp(merged, weight, self.per_run("mix", weight)))
            self.momentum[i].mul_(self.per_run("damp", weight))

    def per_run(self, name: str, like: Tensor) -> Tensor:
        """Return one setting of all runs, shaped to multiply a tensor like `like`."""
        values = [float(getattr(settings, name)) for settings in self.settings]
        return torch.tensor(values, device=like.device).view(-1, *[1] * (like.dim() - 1))

    def accuracy(self) -> Tensor:
        """Evaluate the published weights, by settings and seed."""
        inputs, targets = self.data.test[0].flatten(1), self.data.test[1]
        hits = torch.zeros(len(self.settings), len(self.seeds), device=inputs.device)
        for part, right in zip(inputs.split(2000), targets.split(2000), strict=True):
            shape = (len(self.settings), len(self.seeds), 1, *part.shape)
            with torch.no_grad():
                hits += (forward(part.expand(shape), self.published).argmax(-1) == right).sum((2, 3))
        return hits / len(targets)


def forward(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Apply the MLPs of all runs at once."""
    for layer in range(0, len(weights), 2):
        inputs = functional.relu(inputs) if layer else inputs
        inputs = inputs @ weights[layer].transpose(-1, -2) + weights[layer + 1].unsqueeze(-2)
    return inputs


def add_best(
    table: Table, data: Images, seeds: Sequence[int], period: int, delay: int, **variant: float
) -> None:
    """Add a row with the outer learning rate that needs the fewest steps."""
    settings = [Settings(outer_lr=rate, **variant) for rate in RATES]  # type: ignore[arg-type]
    steps, final = BatchedRuns(data, seeds, settings, period, delay).run()
    fewest = int(steps.mean(1).argmin())
    found = steps[fewest]
    table.row(
        str(period),
        str(delay),
        ", ".join(f"{name} {value:g}" for name, value in variant.items()),
        f"{RATES[fewest]:g}",
        f"{found.mean():.0f}",
        f"{found.std() / len(seeds) ** 0.5:.0f}",
        str(int((found == MISSED).sum())),
        f"{final[fewest].mean():.4f}",
    )


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("diloco_settings", __doc__)
    add_data_option(parser)
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args(arguments)
    folder = require_data(parser, options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    data = task("fashion-mnist", model="mlp", batch_size=BATCH).load(folder).to(device)
    assert isinstance(data, Images)
    seeds = range(10, 10 + options.seeds)  # not the seeds of the tables that use these settings
    columns = ["period", "delay", "variant", "best outer lr", "steps", "± (standard error)"]
    columns += ["runs that missed", "final"]
    table = Table("diloco_settings", __doc__ or "", columns)
    table.note(f"{options.seeds} seeds, outer learning rates {', '.join(f'{rate:g}' for rate in RATES)}")
    for period in PERIODS:
        for delay in (delay for delay in DELAYS if 2 * delay <= period):
            add_best(table, data, seeds, period, delay)
    for period, delay in AVERAGED:
        for average in AVERAGES:
            add_best(table, data, seeds, period, delay, average=average)
    for period, delay in MERGE_VARIANTS:
        add_best(table, data, seeds, period, delay, carry=True)
        add_best(table, data, seeds, period, delay, mix=0.5)
        add_best(table, data, seeds, period, delay, damp=0.5)
    table.write()
