"""What does SelSync's own arithmetic cost per step?

    python -m benchmarks run selsync_norm

The time of ‖g‖² and Δ, without the exchange of the flag, compared with forward, backward and optimizer of
`fashion-mnist` at its batch size, in turn, on one core. Goal: under 2% of a step of the CNN. Times are
processor time, not wall-clock time: other work on the machine would stretch the long part more often than the
short one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from benchmarks.support.training import train_step
from offbeat import SelSync
from offbeat.core.pending import block_on
from offbeat.core.replica import Replica
from offbeat.experiments.tasks import task
from offbeat.strategies.selsync import BackwardNorm, SelSyncState


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("selsync_norm", __doc__)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table("selsync_norm", __doc__ or "", ["model", "step ms", "norm and Δ µs", "/ step", "goal"])
    for name, goal in (("cnn", "< 2%"), ("mlp", "–"), ("lenet5", "–")):
        what = task("fashion-mnist", model=name)
        model = what.build()
        optimizer = what.optimizer(model)
        replica, strategy, watch = Replica(model), SelSync(), SelSyncState()
        x, y = torch.randn(what.batch_size, 1, 28, 28), torch.randint(10, (what.batch_size,))
        steps, norms = [], []
        for _ in range(options.rounds):
            start = time.process_time()
            train_step(model, optimizer, x, y)
            stepped = time.process_time()
            strategy.change(watch, block_on(BackwardNorm(replica).square()), world=4)
            steps.append(stepped - start)
            norms.append(time.process_time() - stepped)
        step_s, norm_s = statistics.median(steps), statistics.median(norms)
        table.row(name, f"{1e3 * step_s:.2f}", f"{1e6 * norm_s:.0f}", f"{norm_s / step_s:.2%}", goal)
    table.write()
