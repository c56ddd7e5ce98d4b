"""What does SelSync's own arithmetic cost, beside a step?

    python -m benchmarks.selsync_norm

‖g‖² and Δ, without the flag's exchange, against forward, backward and optimizer of `fashion-mnist` at its
batch size, in turns, on one core: under 2% of a step of the CNN. Processor time, not the clock on the wall:
what else runs on the machine would stretch the long part more often than the short one.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from benchmarks.tables import Table
from offbeat import SelSync
from offbeat.replica import Replica
from offbeat.strategies.sel_sync import Watch, squared_norm
from offbeat.tasks import task

ROUNDS = 200


def main() -> None:
    torch.set_num_threads(1)
    table = Table("selsync-norm", __doc__ or "", ["model", "step ms", "norm and Δ µs", "of a step", "goal"])
    for name, goal in (("cnn", "< 2%"), ("mlp", "–"), ("lenet5", "–")):
        what = task("fashion-mnist", model=name)
        model = what.build()
        optimizer = what.optimizer(model)
        replica, strategy, watch = Replica(model), SelSync(), Watch()
        x, y = torch.randn(what.batch_size, 1, 28, 28), torch.randint(10, (what.batch_size,))
        steps, norms = [], []
        for _ in range(ROUNDS):
            began = time.process_time()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            stepped = time.process_time()
            strategy.change(watch, squared_norm(replica), world=4)
            steps.append(stepped - began)
            norms.append(time.process_time() - stepped)
        step_s, norm_s = statistics.median(steps), statistics.median(norms)
        table.row(name, f"{1e3 * step_s:.2f}", f"{1e6 * norm_s:.0f}", f"{norm_s / step_s:.2%}", goal)
    table.write()


if __name__ == "__main__":
    main()
