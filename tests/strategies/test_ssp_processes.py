"""The staleness bound, over real processes: random speeds, kills and newcomers, looked at from outside.

A worker that was let on at clock c, while another one that lives had
begun c − s − 1 steps at the most, was let on too early, whatever the server says of it.
"""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path
from random import Random

import pytest

from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.bootstrap import SERVER
from tests.support.limits import HANG_S
from tests.support.python import Python
from tests.support.served import Serve
from tests.support.served import forked_serve as forked_serve

pytestmark = pytest.mark.processes

WORKERS, EVENTS = 3, 60
WORKER = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[2])]!r}
import offbeat
from tests.support.counting import *
model = Counting({WORKERS})
optimizer = counting_optimizer(model)
strategy = offbeat.SSP(staleness=int(sys.argv[1]), overlap=False)
with offbeat.attach(model, optimizer, strategy, timeout_s={HANG_S}) as sync:
    way = sync.port.client.transport.channels[0]
    print(way.clock, 0, flush=True)
    for line in sys.stdin:
        count_on(model, optimizer)
        print(way.clock, sync.metrics.staleness_max, flush=True)
"""


class Worker:
    """A process that steps when it is told to, and says when it was let on."""

    def __init__(self, address: str, staleness: int) -> None:
        self.process = Python(
            *("-c", WORKER, str(staleness)),
            env={**os.environ, SERVER: address, TOKEN: "secret"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.busy = True  # it is coming
        self.clock: int | None = None  # None: it is not there yet

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.busy = True

    def hear(self) -> int:
        """Take in what it says; the staleness that it has seen."""
        assert self.process.stdout is not None
        self.clock, seen = map(int, self.process.stdout.readline().split())
        self.busy = False
        return seen

    @property
    def begun(self) -> int:
        """How many steps it has begun, at the most, as the server counts."""
        assert self.clock is not None
        return self.clock + self.busy

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nobody_is_let_on_too_early(serve: Serve, tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    staleness = random.randrange(3)
    where = ("--listen", "127.0.0.1:0", "--snapshots", str(tmp_path), "--every", "1000")
    served = serve("--workers", str(WORKERS), *where)
    workers = [Worker(served.address, staleness) for _ in range(WORKERS)]
    speeds = [random.choice([1, 2, 5]) for _ in range(3 * WORKERS)]
    let_on = kills = joins = 0
    try:
        for event in range(EVENTS):
            idle = [w for w in workers if not w.busy]
            if event % 20 == 12 and len(workers) > 2 and idle:
                random.choice(idle).end()
                workers = [w for w in workers if w.process.poll() is None]
                kills += 1
            elif event % 20 == 16:
                workers.append(Worker(served.address, staleness))
                joins += 1
            elif idle:
                weights = [speeds[workers.index(w)] for w in idle]
                random.choices(idle, weights)[0].step()
            # Wait only where nobody can be told anything: the slowest is never held up, so somebody answers.
            patience_s = 0.0 if any(not w.busy for w in workers) else HANG_S
            ready, _, _ = select.select([w.process.stdout for w in workers if w.busy], [], [], patience_s)
            assert ready or not patience_s, "all wait, and nobody is let on"
            for worker in [w for w in workers if w.process.stdout in ready]:
                came = worker.clock is None
                assert worker.hear() <= staleness
                here = [w.begun for w in workers if w.clock is not None]
                assert worker.clock is not None
                assert came or worker.clock - min(here) <= staleness
                let_on += not came
    finally:
        for worker in workers:
            worker.end()
    assert let_on > EVENTS / 3 and kills >= 2 and joins >= 2
