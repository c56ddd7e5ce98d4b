"""Several shards of Oscars and workers that wait for all of them: messages and seconds, no network."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from statistics import median_low
from typing import Any

import torch

from offbeat import Oscars
from offbeat.server.messages import Answer, Join, JoinAck, Leave, Pull, PullReply, Push, Tick
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.strategies.oscars import UNTIMED, OscarsState

STEP_S, SEND_S = 0.5, 0.02
STRATEGY = Oscars()


@dataclass
class Trainee:
    """A worker: its clock, and the shards' answers to its latest push."""

    clock: int
    began_s: float = 0.0
    stepped_s: float = 0.0  # when its latest step ended, or its round began
    state: OscarsState = field(default_factory=lambda: OscarsState([]))
    push: Push | None = None  # while it waits for answers
    reached: set[int] = field(default_factory=set)  # the shards that have its push
    answers: dict[int, int] = field(default_factory=dict)


class Troupe:
    """Shards and workers that train; steps and messages take slightly different times.

    With `together`, the loop lets workers wait for each other in every step, as one that logs a mean loss.
    """

    def __init__(
        self, shards: int, workers: int, seed: int, *, spread: float = 0.02, together: bool = False
    ) -> None:
        self._spread, self._together = spread, together
        self._held: list[tuple[int, int]] = []  # workers that wait for others in the loop
        self.rng, self.now_s, self.done_s = random.Random(seed), 0.0, list[float]()
        self.workers: dict[int, Trainee] = {}
        self._shards = [self._new_shard({}) for _ in range(shards)]
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
        self.workers[worker] = Trainee(max(clocks), began_s=self.now_s)
        self._compute(worker, 0)

    def kill(self, back_after_s: float) -> None:
        """Kill a worker; another one takes its place."""
        worker = self.rng.choice(sorted(self.workers))
        del self.workers[worker]
        for index, shard in enumerate(self._shards):
            self._send(index, shard.handle(Leave(worker=worker, at_s=self.now_s)))
        self.at(self.now_s + back_after_s, self.start)

    def shift(self) -> None:
        """Let a worker do one step more than was planned."""
        self.workers[min(self.workers)].state.planned += 1

    def stall(self, length_s: float) -> None:
        """Let one shard do nothing for a while, and then go on."""
        self._stalled_until_s[self.rng.randrange(len(self._shards))] = self.now_s + length_s

    def crash(self, length_s: float) -> None:
        """Let one shard do nothing for a while, and then start again, with all that it had acknowledged."""
        index = self.rng.randrange(len(self._shards))
        self._stalled_until_s[index] = self.now_s + length_s
        self.at(self.now_s + length_s, self._restart, index)

    def _restart(self, index: int) -> None:
        shard = self._shards[index] = self._new_shard(dict(self._shards[index].shard.applied))
        for worker, trainee in self.workers.items():
            acknowledged = trainee.clock - (trainee.push is not None and index not in trainee.reached)
            shard.handle(Join(worker=worker, clock=acknowledged))
            if index in trainee.reached and index not in trainee.answers:  # the rest is under way
                self._send(index, shard.handle(Pull(worker=worker, clock=trainee.clock)))

    @staticmethod
    def _new_shard(applied: dict[int, int]) -> ParameterServer:
        return ParameterServer(ShardState([torch.zeros(1)], applied), STRATEGY.server_half())

    def _compute(self, worker: int, done: int) -> None:
        trainee = self.workers.get(worker)
        if trainee is None:
            return
        state = trainee.state
        if done:
            self.done_s.append(self.now_s)
            state.total += 1
            state.times_s.append(self.now_s - trainee.stepped_s)
            held, self._held = self._held, []
            for other, others_done in held:
                self._step(other, others_done)
        trainee.stepped_s = self.now_s
        if done < state.planned and not STRATEGY._is_over(state):
            self._step(worker, done)
            return
        typical_s = median_low(state.times_s)
        state.step_s = STRATEGY._smoothed(state.step_s, typical_s) if state.total > UNTIMED else 0.0
        state.times_s = []
        trainee.clock, trainee.answers, trainee.reached = trainee.clock + 1, {}, set()
        trainee.push = Push(
            worker=worker,
            clock=trainee.clock,
            update=[torch.zeros(1)],
            report=(float(done), float(done), state.step_s, 2 * SEND_S, 0.0, 0.0),
            spent_s=self.now_s - trainee.began_s,
        )
        for index in range(len(self._shards)):
            self.at(self._arrival_s(), self._arrive, index, trainee.push)

    def _step(self, worker: int, done: int) -> None:
        """Do a step, if the loop need not wait for workers that have done fewer."""
        total = self.workers[worker].state.total
        if self._together and any(other.state.total < total for other in self.workers.values()):
            self._held.append((worker, done))
        else:
            seconds = STEP_S * self.rng.uniform(1.0, 1.0 + self._spread)
            self.at(self.now_s + seconds, self._compute, worker, done + 1)

    def _arrive(self, index: int, push: Push) -> None:
        if self.now_s < self._stalled_until_s[index]:
            self.at(self._stalled_until_s[index], self._arrive, index, push)
        elif push.worker in self.workers:
            self.workers[push.worker].reached.add(index)
            shard = self._shards[index]
            self._send(index, shard.handle(_arrived(push, self.now_s)))
            self._send(index, shard.handle(Pull(worker=push.worker, clock=push.clock)))

    def _send(self, index: int, answers: list[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, PullReply):
                self.at(self._arrival_s(), self._read, index, answer.worker, answer.hint)
        wake_s = self._wake_s(index)
        if wake_s is not None:
            self.at(max(wake_s, self.now_s), self._wake, index, wake_s)

    def _read(self, index: int, worker: int, hint: int) -> None:
        trainee = self.workers.get(worker)
        if trainee is None:
            return
        trainee.answers[index] = hint
        if len(trainee.answers) == len(self._shards):
            trainee.state.planned, trainee.push, trainee.began_s = trainee.answers[0], None, self.now_s
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


def _arrived(push: Push, at_s: float) -> Push:
    return Push(**{**push.__dict__, "at_s": at_s})
