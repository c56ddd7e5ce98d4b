"""Workers of one host, and their launcher: it forks them, kills them when told to, and starts them again."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.elastic.registry import MEMBER, RENDEZVOUS, report_death
from offbeat.worlds.processes.emulation import pace
from offbeat.worlds.processes.server.bootstrap import parse_address
from offbeat.worlds.processes.server.rank_lease import WORKER

BATCH = 32
PACE_S = 0.1  # far longer than the real computation: all workers share the machine's cores
TIMEOUT_S = 30.0
LR = 0.05
LEAST = 0.01  # of the learning rate, at the end
LOOK_S = 0.1  # between looks at the workers
STRATEGIES: dict[str, Any] = {
    "local_sgd": offbeat.LocalSGD(period=8),
    "diloco": offbeat.DiLoCo(period=16),
    "selsync": offbeat.SelSync(),
    "ssp": offbeat.SSP(staleness=3),
    "oscars": offbeat.Oscars(tau=4),
}
ELASTIC = ("local_sgd", "diloco", "selsync")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, as all of its workers know it."""

    strategy: str
    address: str  # of the server, or of the elastic workers' store
    world: int
    seconds: float  # over which the learning rate falls, from the moment when all workers train
    data: str
    folder: str  # for the workers' logs and results

    @property
    def elastic(self) -> bool:
        return self.strategy in ELASTIC

    def log(self, slot: int) -> Path:
        """Return the file with a line for each step of a worker: time, clock, loss."""
        return Path(self.folder) / f"steps-{slot}"

    def result(self, slot: int) -> Path:
        """Return the file with a worker's final accuracy."""
        return Path(self.folder) / f"result-{slot}"

    @property
    def began(self) -> Path:
        """The file that says when all workers trained."""
        return Path(self.folder) / "began"

    @property
    def stop(self) -> Path:
        """The file that ends the training; elastic workers end together, at the clock in it."""
        return Path(self.folder) / "stop"

    def text(self) -> str:
        return json.dumps(asdict(self))


def train(job: Job, slot: int, data: Any) -> None:
    """Train until the job is stopped; log every step, and write the final accuracy."""
    what = task("fashion-mnist", model="mlp")
    torch.manual_seed(0)
    model = what.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for group in optimizer.param_groups:
        group["initial_lr"] = LR
    pace(model, PACE_S)
    order = torch.Generator().manual_seed(1000 * slot + int(time.time()) % 1000)
    own = torch.arange(slot, len(data), job.world)
    sync = offbeat.attach(
        model, optimizer, STRATEGIES[job.strategy], elastic=job.elastic, timeout_s=TIMEOUT_S
    )
    began_s: float | None = None
    with job.log(slot).open("a", buffering=1) as log:
        while not _is_over(job, sync.clock):
            began_s = began_s or (float(job.began.read_text()) if job.began.exists() else None)
            passed = (time.time() - began_s) / job.seconds if began_s else 0.0
            for group in optimizer.param_groups:
                group["lr"] = LR * max(LEAST, 1 - passed)
            batch = data.batch(own[torch.randint(len(own), (BATCH,), generator=order)])
            optimizer.zero_grad()
            loss = what.loss(model, batch)
            loss.backward()
            optimizer.step()
            log.write(f"{time.time():.3f} {sync.clock} {loss.item():.4f}\n")
    with sync.consensus():
        accuracy = what.evaluate(model, data)
    write_whole(job.result(slot), json.dumps(accuracy))
    sync.close(publish=False)


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see only when it is whole."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _is_over(job: Job, clock: int) -> bool:
    return job.stop.exists() and (not job.elastic or clock >= int(job.stop.read_text() or 0))


class HostLauncher:
    """Launcher of one host's workers, forked from this process, which has imported torch and has the data."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self._job = job
        self._data = task("fashion-mnist", model="mlp").load(Path(job.data))
        self._running: dict[int, tuple[int, str]] = {}  # by process: its slot and its name
        self._starts = 0
        self._store: dist.Store | None = None

    def run(self) -> None:
        """Do what is written to this process: `start SLOT` or `kill SLOT`, until that ends."""
        print("ready", flush=True)
        try:
            while True:
                if select.select([0], [], [], LOOK_S)[0]:
                    text = os.read(0, 1 << 16).decode()  # whole lines, as they were written
                    if not text:
                        return
                    for order, slot in map(str.split, text.splitlines()):
                        self._start(int(slot)) if order == "start" else self._kill(int(slot))
                self._reap()
        finally:
            for pid in self._running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _start(self, slot: int) -> None:
        self._starts += 1
        member = f"slot{slot}-{os.getpid()}-{self._starts}"
        pid = os.fork()
        if pid:
            self._running[pid] = (slot, member)
            return
        code = 1
        try:
            where = RENDEZVOUS if self._job.elastic else "OFFBEAT_SERVER"
            os.environ.update({where: self._job.address, WORKER: f"slot{slot}", MEMBER: member})
            if self._job.elastic:
                os.environ.update({"RANK": str(slot), "WORLD_SIZE": str(self._job.world)})
            train(self._job, slot, self._data)
            code = 0
        except offbeat.OffbeatError as error:
            print(f"slot {slot}: {type(error).__name__}: {error}", flush=True)
        except BaseException as error:
            print(f"slot {slot} failed: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)

    def _kill(self, slot: int) -> None:
        for pid, (of, _) in self._running.items():
            if of == slot:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Report workers that have ended, and start them again unless they are done."""
        for pid, (slot, member) in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._running[pid]
            if self._job.elastic:
                self._report_death(member)
            code = os.waitstatus_to_exitcode(status)
            print(f"ended {slot} {code}", flush=True)
            if code and not self._job.result(slot).exists():
                self._start(slot)

    def _report_death(self, member: str) -> None:
        try:
            if self._store is None:
                host, port = parse_address(self._job.address)
                self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            report_death(self._store, member)
        except RuntimeError as unreachable:  # this host may be cut off; heartbeats tell the others
            self._store = None
            print(f"a death could not be reported: {str(unreachable).splitlines()[0]}", flush=True)
