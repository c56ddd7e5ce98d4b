"""Several shards of Oscars and workers that wait for all of them: messages and seconds, no network."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from offbeat import Oscars
from offbeat.server.messages import Answer, Join, JoinAck, Leave, Pull, PullReply, Push, Tick
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState

STEP_S, SEND_S = 0.5, 0.02


@dataclass
class Trainee:
    """A worker: its clock, the shards' answers to its latest push, and what it does next."""

    clock: int
    planned: int = 1
    total: int = 0
    answers: dict[int, int] = field(default_factory=dict)


class Troupe:
    """Shards and workers that train; steps and messages take slightly different times."""

    def __init__(self, shards: int, workers: int, seed: int) -> None:
        self.rng, self.now_s, self.done_s = random.Random(seed), 0.0, list[float]()
        self.workers: dict[int, Trainee] = {}
        half = Oscars().server_half()
        self._shards = [ParameterServer(ShardState([torch.zeros(1)]), half) for _ in range(shards)]
        self._stalled_until_s = [0.0] * shards
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._numbers = count(), count()
        for _ in range(workers):
            self.start()

    def at(self, at_s: float, act: Callable[..., None], *about: Any) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (at_s, next(self._order), act, about))

    def run(self, until_s: float) -> None:
        while self._events[0][0] < until_s:
            self.now_s, _, act, about = heapq.heappop(self._events)
            act(*about)

    def busy(self, from_s: float) -> float:
        """Return the fraction of the seconds since then that the workers have computed."""
        steps = sum(at_s > from_s for at_s in self.done_s)
        return steps * STEP_S / (self.now_s - from_s) / len(self.workers)

    def start(self) -> None:
        """Start a worker, under a number that none had."""
        worker, clocks = next(self._numbers), list[int]()
        for shard in self._shards:
            (joined,) = shard.handle(Join(worker=worker))
            assert isinstance(joined, JoinAck)
            clocks.append(joined.clock)
        self.workers[worker] = Trainee(max(clocks))
        self._compute(worker, 0)

    def kill(self, back_after_s: float) -> None:
        """Kill a worker; another one takes its place."""
        worker = self.rng.choice(sorted(self.workers))
        del self.workers[worker]
        for index, shard in enumerate(self._shards):
            self._send(index, shard.handle(Leave(worker=worker, at_s=self.now_s)))
        self.at(self.now_s + back_after_s, self.start)

    def stall(self, length_s: float) -> None:
        """Let one shard do nothing for a while, as one that starts again."""
        self._stalled_until_s[self.rng.randrange(len(self._shards))] = self.now_s + length_s

    def _compute(self, worker: int, done: int) -> None:
        trainee = self.workers.get(worker)
        if trainee is None:
            return
        if done:
            self.done_s.append(self.now_s)
            trainee.total += 1
        if done < trainee.planned:
            self.at(self.now_s + STEP_S * self.rng.uniform(1.0, 1.02), self._compute, worker, done + 1)
            return
        trainee.clock, trainee.answers = trainee.clock + 1, {}
        timed_s = STEP_S if trainee.total > 2 else 0.0
        report = (float(done), float(done), timed_s, 2 * SEND_S, 0.0, 0.0)
        for index in range(len(self._shards)):
            self.at(self._arrival_s(), self._arrive, index, worker, trainee.clock, report)

    def _arrive(self, index: int, worker: int, clock: int, report: tuple[float, ...]) -> None:
        if self.now_s < self._stalled_until_s[index]:
            self.at(self._stalled_until_s[index], self._arrive, index, worker, clock, report)
        elif worker in self.workers:
            push = Push(worker=worker, clock=clock, update=[torch.zeros(1)], report=report, at_s=self.now_s)
            self._send(index, self._shards[index].handle(push))
            self._send(index, self._shards[index].handle(Pull(worker=worker, clock=clock)))

    def _send(self, index: int, answers: list[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, PullReply):
                self.at(self._arrival_s(), self._read, index, answer.worker, answer.hint)
        wake_s = self._wake_s(index)
        if wake_s is not None:
            self.at(wake_s, self._wake, index, wake_s)

    def _read(self, index: int, worker: int, hint: int) -> None:
        trainee = self.workers.get(worker)
        if trainee is not None:
            trainee.answers[index] = hint
            if len(trainee.answers) == len(self._shards):
                trainee.planned = trainee.answers[0]
                self._compute(worker, 0)

    def _wake(self, index: int, due_s: float) -> None:
        if self._wake_s(index) == due_s:
            if self.now_s < self._stalled_until_s[index]:
                self.at(self._stalled_until_s[index], self._wake, index, due_s)
            else:
                self._send(index, self._shards[index].handle(Tick(at_s=self.now_s)))

    def _wake_s(self, index: int) -> float | None:
        shard = self._shards[index]
        return shard.aggregation.wake_at(shard.state)

    def _arrival_s(self) -> float:
        return self.now_s + SEND_S * self.rng.uniform(1.0, 1.15)
