"""Launcher of one host's workers: forks them, kills them when it is told to, and starts them again.

It is a warm parent, as those of preemptible workers are: a process without threads that has imported all
that a worker imports, and has the data. A worker that is started is forked from it, and builds its model at
once. (`import torch` is not enough: the first optimizer of a process imports 900 modules more.)
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import offbeat
from benchmarks.chaos.job import WORKERS, Event, Job
from benchmarks.chaos.worker import make_optimizer, make_task, train
from offbeat.worlds.processes.elastic.registry import MEMBER, RENDEZVOUS, report_death
from offbeat.worlds.processes.server.bootstrap import parse_address
from offbeat.worlds.processes.server.rank_lease import WORKER

LOOK_S = 0.02  # between looks at the workers
STORE_S = 2.0  # to connect to the store


class HostLauncher:
    """The workers of one host, and the orders that this process reads."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self._job = job
        self._data = make_task().load(Path(job.data))
        offbeat.attach  # noqa: B018  (imported when it is first named)
        make_optimizer(make_task().build())
        self._running: dict[int, tuple[int, str]] = {}  # by process: its slot and its name
        self._stopped: set[int] = set()  # slots whose workers stay away
        self._starts = 0
        self._store: dist.Store | None = None
        if job.peer:
            import benchmarks.chaos.torchft_worker  # noqa: F401  (warm, too)

    def run(self) -> None:
        """Do what is written to this process, until that ends: `start`, `kill` or `stop`, and a slot.

        A worker that is killed is started again at once, one that is stopped when it is told.
        """
        print("ready", flush=True)
        try:
            while True:
                if select.select([0], [], [], LOOK_S)[0]:
                    text = os.read(0, 1 << 16).decode()  # whole lines, as they were written
                    if not text:
                        return
                    for order, slot in map(str.split, text.splitlines()):
                        self._obey(order, int(slot))
                self._reap()
        finally:
            for pid in self._running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _obey(self, order: str, slot: int) -> None:
        self._stopped.discard(slot)
        if order == "start":
            self._start(slot)
            return
        if order == "stop":
            self._stopped.add(slot)
        self._kill(slot)

    def _start(self, slot: int) -> None:
        self._starts += 1
        member = f"slot{slot}-{os.getpid()}-{self._starts}"
        self._note(slot, "started")
        pid = os.fork()
        if pid:
            self._running[pid] = (slot, member)
            return
        code = 1
        try:
            where = RENDEZVOUS if self._job.elastic else "OFFBEAT_SERVER"
            os.environ.update({where: self._job.address, WORKER: f"slot{slot}", MEMBER: member})
            if self._job.elastic:
                os.environ.update({"RANK": str(slot), "WORLD_SIZE": str(WORKERS)})
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
                self._note(slot, "killed")
                os.kill(pid, signal.SIGKILL)

    def _note(self, slot: int, name: str) -> None:
        with self._job.log(slot).open("a") as log:
            log.write(Event(time.time(), name).line())

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
            print(f"{time.time():.3f} ended {slot} {code}", flush=True)
            if code and slot not in self._stopped and not self._job.result(slot).exists():
                self._start(slot)

    def _report_death(self, member: str) -> None:
        try:
            if self._store is None:
                host, port = parse_address(self._job.address)
                limit = timedelta(seconds=STORE_S)
                self._store = dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
            report_death(self._store, member)
        except RuntimeError as unreachable:  # this host may be cut off; heartbeats tell the others
            self._store = None
            print(f"a death could not be reported: {str(unreachable).splitlines()[0]}", flush=True)
