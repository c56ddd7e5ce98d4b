"""Workers that are started one by one, over a store in the test's process, and may be killed or stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import offbeat
from offbeat.worlds.processes.elastic import heartbeat
from offbeat.worlds.processes.elastic.registry import MEMBER, RENDEZVOUS, report_death
from offbeat.worlds.processes.launcher import START_METHOD
from tests.support.crew import FORKED_WITH
from tests.support.limits import HANG_S

LR = 0.125
SILENT_LOOKS = 40  # on a busy machine a live worker is silent for some seconds

Say = Callable[[Any], None]


def _work(environment: dict[str, str], pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    heartbeat.SILENT_LOOKS = SILENT_LOOKS
    try:
        pipe.send(("ended", function(pipe.send, *args)))
    except offbeat.OffbeatError as error:
        pipe.send((type(error).__name__, str(error)))


class ElasticCrew:
    """Processes around a store. A death is reported at once, as a launcher does."""

    def __init__(self, founders: int) -> None:
        self.founders = founders
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = mp.get_context(START_METHOD)
        self._context.set_forkserver_preload([*FORKED_WITH, "tests.support.elastic"])
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._heard: list[deque[Any]] = []  # by worker: what it has said, and nobody has asked for yet
        self._ended: set[Connection] = set()

    def start(self, function: Callable[..., Any], *args: Any) -> int:
        """Start one more worker, and return its number."""
        number = len(self.processes)
        environment = {
            "RANK": str(number),
            "WORLD_SIZE": str(self.founders),
            RENDEZVOUS: f"127.0.0.1:{self.store.port}",
            MEMBER: f"worker{number}",
        }
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(environment, theirs, function, args), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        self._pipes.append(ours)
        self._heard.append(deque())
        threading.Thread(target=self._report, args=(process, f"worker{number}"), daemon=True).start()
        return number

    def _report(self, process: Any, member: str) -> None:
        wait([process.sentinel])
        report_death(self.store, member)

    def hear(self, number: int) -> Any:
        """Return the next thing that a worker says.

        Others are heard meanwhile: one whose pipe is full would stop, and all who train with it.
        """
        own, process = self._pipes[number], self.processes[number]
        deadline = monotonic() + HANG_S
        while not self._heard[number]:
            pipes = [pipe for pipe in self._pipes if pipe not in self._ended]
            ready = wait([*pipes, process.sentinel], max(0.0, deadline - monotonic()))
            for pipe, heard in zip(self._pipes, self._heard, strict=True):
                if pipe in ready:
                    try:
                        heard.append(pipe.recv())
                    except (EOFError, OSError):
                        self._ended.add(pipe)
            is_dead = own in self._ended or (process.sentinel in ready and own not in ready)
            if not self._heard[number]:
                late = monotonic() >= deadline
                assert not (is_dead or late), f"worker {number} is silent, exit code {process.exitcode}"
        return self._heard[number].popleft()

    def result(self, number: int) -> Any:
        """Return what a worker's function returned."""
        while True:
            kind, value = self.hear(number)
            assert kind in ("said", "ended"), f"worker {number}: {kind}: {value}"
            if kind == "ended":
                return value

    def signal(self, number: int, which: signal.Signals) -> None:
        os.kill(self.processes[number].pid, which)

    def dismiss(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class Bowl(nn.Module):
    """½‖w − target‖²: its gradient is w − target, so all means are known. Two blocks, and a buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(20, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(12, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        self.target = target_of(number)

    def forward(self) -> Tensor:
        self.seen += self.target[:2]
        return 0.5 * (torch.cat([self.first, self.second]) - self.target).square().sum()

    def weights(self) -> Tensor:
        return torch.cat([self.first, self.second]).detach().clone()


def target_of(number: int) -> Tensor:
    return torch.arange(32, dtype=torch.float64) * (number + 1) - 7.0 * number * number


class Deed:
    """Something that a worker does to itself, once, at a point of its program."""

    def __init__(self, number: int, when: str, clock: int, which: signal.Signals = signal.SIGKILL) -> None:
        self.number, self.when, self.clock, self.which = number, when, clock, which

    def prepare(self, number: int, sync: offbeat.Sync) -> None:
        if number != self.number:
            return
        port: Any = sync.port
        if self.when == "launched":  # in the middle of an exchange: others may have received some of it
            start = port.lanes.start

            def start_and_act(operation: Any, lane: Any) -> None:
                start(operation, lane)
                self._act(sync)

            port.lanes.start = start_and_act
        else:  # right after it has counted itself, before it could learn of the decision
            registry = port.member._registry
            add = registry.add

            def add_and_act(key: str, amount: int) -> Any:
                added = add(key, amount)
                if key.startswith("votes/") and amount:
                    self._act(sync)
                return added

            registry.add = add_and_act

    def _act(self, sync: offbeat.Sync) -> None:
        if self.which is not None and sync.clock == self.clock:
            which, self.which = self.which, None  # type: ignore[assignment]
            os.kill(os.getpid(), which)


def train_bowl(
    say: Say,
    strategy: Any,
    until: Callable[[int, list[int]], bool],
    deeds: list[Deed],
    minimum: int = 1,
    momentum: float = 0.0,
) -> dict[str, Any]:
    """Train until `until(clock, worlds)`, where worlds are those of the steps so far; after a drop, again."""
    number = int(os.environ["RANK"])
    while True:
        model = Bowl(number)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
        try:
            with offbeat.attach(
                model, optimizer, strategy, elastic=True, minimum=minimum, timeout_s=HANG_S
            ) as sync:
                joined_at, worlds = sync.clock, []
                say(("said", ("attached", sync.port.world, joined_at)))
                for deed in deeds:
                    deed.prepare(number, sync)
                while not until(sync.clock, worlds):
                    optimizer.zero_grad()
                    model().backward()
                    optimizer.step()
                    worlds.append(sync.port.world)
                    say(("said", ("step", sync.clock, sync.port.world)))
                own = model.weights().tolist()  # a tensor would share memory with a process that ends
                sync.settle()
                with sync.consensus():
                    published = model.weights().tolist()
                state = [entry["momentum_buffer"].tolist() for entry in optimizer.state.values() if momentum]
                return {
                    "weights": own,
                    "published": published,
                    "seen": model.seen.tolist(),
                    "joined_at": joined_at,
                    "worlds": worlds,
                    "steps": sync.metrics.steps,
                    "momentum": state,
                    "rank": sync.port.rank,
                }
        except offbeat.RankDropped as dropped:
            say(("said", ("dropped", str(dropped))))
            deeds = []


class After:
    """Train for this many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, clock: int, worlds: list[int]) -> bool:
        return clock >= self.steps


class AfterReturn:
    """Train until some steps after the world has its full size again, as all workers see it alike."""

    def __init__(self, world: int, more: int) -> None:
        self.world, self.more = world, more

    def __call__(self, clock: int, worlds: list[int]) -> bool:
        if self.world not in worlds:
            return False
        last = len(worlds) - 1
        shrunk = [i for i, world in enumerate(worlds) if world < self.world]
        grown = (shrunk[-1] + 1) if shrunk else 0
        founder = worlds[0] == self.world and not shrunk  # has seen no change yet, or joined as a newcomer
        started_full = founder and clock - len(worlds) == 0
        return not started_full and last - grown + 1 >= self.more
