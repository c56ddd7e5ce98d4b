"""ParameterServer: one shard of the weights, as a state machine. Messages in, answers out.

There is no socket, no clock and no thread in it: the virtual world and the real links drive the same class.
An answer says who is to get the weights as they are now; the one who drives sends them.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from offbeat.messages import Answer, Join, Leave, Message, Pull, Push, Refusal, Reply, Tensors
from offbeat.rule import Rule

G = TypeVar("G")


class ParameterServer(Generic[G]):
    def __init__(self, weights: Tensors, rule: Rule[G]) -> None:
        self.weights = weights
        self.rule = rule
        self.state = rule.init()
        self.refused: dict[int, int] = {}  # by worker
        self._waiting: dict[int, Pull] = {}
        # A push counts in the clocks once its worker asks to go on, so that workers which are let on together
        # read the very same weights: with a staleness of 0 that is BSP.
        self._uncounted: dict[int, Push] = {}

    def handle(self, message: Message) -> list[Answer]:
        """Take a message; all answers that can be given now, to whomever."""
        answers: list[Answer] = []
        match message:
            case Push():
                answers += self._fold(message)
            case Pull():
                if message.clock is not None and message.worker in self._uncounted:
                    self.rule.fold(self.state, self._uncounted.pop(message.worker))
                self._waiting[message.worker] = message
            case Join():
                self.rule.join(self.state, message.worker)
            case Leave():
                self.rule.leave(self.state, message.worker)
                self._waiting.pop(message.worker, None)
                self._uncounted.pop(message.worker, None)
        return answers + self._admit()

    def _fold(self, push: Push) -> list[Answer]:
        # Refused or not, the worker has done its step: the others must not wait for it.
        self._uncounted[push.worker] = push
        if add_if_finite(self.weights, push.update):
            return []
        self.refused[push.worker] = self.refused.get(push.worker, 0) + 1
        return [Refusal(worker=push.worker, reason=f"its update of clock {push.clock} is not finite")]

    def _admit(self) -> list[Answer]:
        admitted = [
            pull
            for pull in self._waiting.values()
            if pull.clock is None or self.rule.admits(self.state, pull.worker, pull.clock)
        ]
        for pull in admitted:
            del self._waiting[pull.worker]
        return [Reply(worker=p.worker, behind=self.rule.behind(self.state, p.clock)) for p in admitted]


def add_if_finite(weights: Tensors, update: Tensors) -> bool:
    """weights += update; nothing is changed if the update is not finite (then neither is its sum)."""
    if not all(bool(torch.isfinite(change.sum())) for change in update):
        return False
    for whole, change in zip(weights, update, strict=True):
        whole.add_(change)
    return True


def shares(flats: Tensors, shards: int) -> list[Tensors]:
    """The part of every flat tensor that each shard owns: equal slices, in order."""
    cuts = [[flat.numel() * k // shards for k in range(shards + 1)] for flat in flats]
    return [[flat[cut[k] : cut[k + 1]] for flat, cut in zip(flats, cuts, strict=True)] for k in range(shards)]
