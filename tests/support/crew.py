"""A crew: real worker processes that stay, so that a test over N ranks costs milliseconds, not a launch."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from offbeat.worlds.processes.launcher import IMPORTED, START_METHOD
from tests.support.forked_shards import fork_shards
from tests.support.limits import HANG_S

# What ranks are forked with: what they import with the function of a test, and their zygotes for shards.
FORKED_WITH = (
    *IMPORTED,
    "pytest",
    "offbeat.cli.outputs",
    "offbeat.experiments.process_run",
    "offbeat.worlds.processes.server.shard",
    "tests.support.loops",
)
# Of a rank. Where an attachment failed, its groups stay, and a thread of each wakes 100 times a second.
MOST_THREADS = 48
AFTER_FAILURE_S = 30.0  # how long to wait for the tracebacks of others: the test has failed


class CrewError(AssertionError):
    """A rank raised, died or stayed silent; the message holds every rank's traceback."""


def _work(rank: int, world: int, port: int, orders: Connection, others: list[Connection]) -> None:
    for other in others:
        other.close()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    fork_shards(orders.fileno())
    gc.freeze()  # what was imported before the fork is never searched for wrappers of a model, nor collected
    # The store outlives every rank (it is the test's own process that holds it), so any rank may be killed.
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=timedelta(seconds=HANG_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while True:
        try:
            function, args = orders.recv()
        except EOFError:
            os._exit(0)
        try:
            value = function(*args)
            orders.send((_threads(), (True, value)))
            del value
        except BaseException as failed:
            told = (type(failed).__name__, str(failed), traceback.format_exc())
            orders.send((_threads(), (False, told)))


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


class Crew:
    """`world` ranks with a process group between them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._threads = 0  # of the rank that had most of them after a run
        self._store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        context = mp.get_context(START_METHOD)
        context.set_forkserver_preload(list(FORKED_WITH))
        pipes = [context.Pipe() for _ in range(world)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_work, args=(r, world, self._store.port, theirs, self.pipes), daemon=True)
            for r, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, args))

    def outcomes(
        self, ranks: list[int] | None = None, after_failure_s: float = HANG_S
    ) -> list[tuple[bool, Any]]:
        """What each rank came to: (True, value) or (False, (error's name, message, traceback)).

        When one has failed, the others have `after_failure_s` to end.
        """
        awaited = list(range(self.world)) if ranks is None else ranks
        found: dict[int, tuple[bool, Any]] = {}
        deadline = monotonic() + HANG_S
        while len(found) < len(awaited) and monotonic() < deadline:
            missing = [rank for rank in awaited if rank not in found]
            ends = [end for rank in missing for end in (self.pipes[rank], self.processes[rank].sentinel)]
            wait(ends, max(0.0, deadline - monotonic()))
            for rank in missing:
                outcome = self._outcome(rank)
                if outcome is not None:
                    found[rank] = outcome
                    if not outcome[0]:
                        deadline = min(deadline, monotonic() + after_failure_s)
        return [found.get(rank, (False, ("Gone", f"rank {rank} is silent", ""))) for rank in awaited]

    def _outcome(self, rank: int) -> tuple[bool, Any] | None:
        """Return what a rank has come to; None if it is not at its end."""
        pipe, process = self.pipes[rank], self.processes[rank]
        dead = not process.is_alive()
        if pipe.poll():
            with suppress(EOFError):
                threads, outcome = pipe.recv()
                self._threads = max(self._threads, threads)
                return outcome
        if dead:
            return False, ("Gone", f"rank {rank} died with exit code {process.exitcode}", "")
        return None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on every rank; the values by rank, or an error with all tracebacks."""
        self.start(function, *args)
        outcomes = self.outcomes(after_failure_s=AFTER_FAILURE_S)
        failures = [f"rank {r}: {o[1][1]}\n{o[1][2]}" for r, o in enumerate(outcomes) if not o[0]]
        if failures:
            self.dismiss()
            raise CrewError("\n".join(failures))
        return [value for _, value in outcomes]

    def fit(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    @property
    def littered(self) -> bool:
        """True if runs have left threads behind in a rank, which cost the tests that come after them."""
        return self._threads > MOST_THREADS

    def dismiss(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
