"""A server of Oscars under test, with workers that push by hand."""

from __future__ import annotations

from typing import Any

import torch

from offbeat import Oscars
from offbeat.server.messages import Answer, Join, JoinAck, Pull, PullReply, Push, PushAck
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState


class Stage:
    """A server of one number, and its workers."""

    def __init__(self, workers: int, **settings: Any) -> None:
        self.server = ParameterServer(ShardState([torch.zeros(1)]), Oscars(**settings).server_half())
        self.clocks = dict.fromkeys(range(workers), 0)
        for worker in self.clocks:
            assert self.server.handle(Join(worker=worker)) == [JoinAck(worker=worker, clock=0)]

    def push(
        self,
        worker: int,
        update: float,
        *,
        at_s: float = 0.0,
        samples: float = 1,
        steps: float = 1,
        step_s: float = 0.0,
        exchange_s: float = 0.0,
        spent_s: float | None = None,
        losses: tuple[float, float] = (0.0, 0.0),
    ) -> list[Answer]:
        self.clocks[worker] += 1
        figures = (samples, steps, step_s, exchange_s, *losses)
        told = [torch.tensor([update])]
        if spent_s is None:  # it began with the round
            spent_s = max(0.0, at_s - self.server.state.began_s)
        push = Push(
            worker=worker,
            clock=self.clocks[worker],
            update=told,
            report=figures,
            at_s=at_s,
            spent_s=spent_s,
        )
        receipt, *answers = self.server.handle(push)
        assert isinstance(receipt, PushAck) and receipt.worker == worker
        return ([receipt] if receipt.refused else []) + answers

    def ask(self, worker: int) -> list[Answer]:
        return self.server.handle(Pull(worker=worker, clock=self.clocks[worker]))

    def step(self, worker: int, update: float, **figures: Any) -> dict[int, int]:
        """Push and ask; who is let on, and for how many steps."""
        answers = self.push(worker, update, **figures) + self.ask(worker)
        return {answer.worker: answer.hint for answer in answers if isinstance(answer, PullReply)}

    @property
    def weight(self) -> float:
        return self.server.weights[0].item()
