"""How long does it take to start local workers?

    python -m benchmarks run starting

Four workers connect, build a model and an optimizer, and exit; one launcher does this several times, as
`offbeat compare` does. With `spawn` every worker imports torch again. With `forkserver` workers are forked
from a process that has imported torch already; `offbeat` does this on Linux.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import torch
import torch.distributed as dist

from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from offbeat.worlds.processes import launcher as launching

WORKERS = 4


def work() -> None:
    """Connect to the other workers, build a model and an optimizer, and exit."""
    dist.init_process_group("gloo")
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("starting", __doc__)
    parser.add_argument("--runs", type=int, default=4, help="runs with each method, at least 2")
    options = parser.parse_args(arguments)
    table = Table("starting", __doc__ or "", ["workers are", "first run, s", "each later run, s"])
    later = {}
    for method, called in (("spawn", "spawned"), ("forkserver", "forked")):
        launching.START_METHOD = method
        took = []
        for _ in range(options.runs):
            start = time.perf_counter()
            launching.launch(WORKERS, work)
            took.append(time.perf_counter() - start)
        later[method] = fmean(took[1:])
        table.row(called, f"{took[0]:.1f}", f"{later[method]:.2f}")
    table.note(f"later runs start {later['spawn'] / later['forkserver']:.1f}x faster with forkserver")
    table.write()
