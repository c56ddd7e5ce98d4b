"""How long does it take until local workers are at work?

    python -m benchmarks.starting

Four workers that meet, make a model and an optimizer, and end; several runs by one launcher, as `offbeat
compare` has them. `spawn`: every worker imports torch anew. `forkserver`: workers are forked from a process
that has imported it, as `offbeat` does on Linux.
"""

from __future__ import annotations

import time
from statistics import fmean

import torch
import torch.distributed as dist

from benchmarks.tables import Table
from offbeat.worlds import launch as launching

WORKERS, RUNS = 4, 4


def work() -> None:
    dist.init_process_group("gloo")
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    table = Table("starting", __doc__ or "", ["workers are", "first run s", "each later run s"])
    later = {}
    for method, called in (("spawn", "spawned"), ("forkserver", "forked")):
        launching.START_METHOD = method
        took = []
        for _ in range(RUNS):
            began = time.perf_counter()
            launching.launch(WORKERS, work)
            took.append(time.perf_counter() - began)
        later[method] = fmean(took[1:])
        table.row(called, f"{took[0]:.1f}", f"{later[method]:.2f}")
    table.note(f"later runs: {later['spawn'] / later['forkserver']:.1f} times sooner")
    table.write()


if __name__ == "__main__":
    main()
