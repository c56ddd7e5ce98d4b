"""Messages of a worker to all shards of a virtual server: their sizes, and the answers that are awaited."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from offbeat.core.finite import is_finite
from offbeat.core.ledger import Ledger
from offbeat.server.client import Operation
from offbeat.server.messages import (
    Answer,
    ClientMessage,
    Load,
    Pull,
    PullReply,
    Push,
    PushAck,
    Reduce,
    ReduceReply,
    Save,
    SaveReply,
    Tensors,
)
from offbeat.worlds.virtual.request import VirtualRequest
from offbeat.worlds.virtual.scheduler import Scheduler

T = TypeVar("T")
REQUEST_BYTES = 64  # of a request for weights


class ShardRequest(VirtualRequest[T]):
    """An operation of one worker: a message to each shard, and their answers."""

    __slots__ = (
        "_finish",
        "answers",
        "decode_s",
        "finite",
        "free",
        "messages",
        "missing",
        "sizes",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        operation: Operation,
        messages: Sequence[ClientMessage],
        finish: Callable[[list[Any]], T],
    ) -> None:
        if isinstance(messages[0], Pull):
            self.sizes = [REQUEST_BYTES] * len(messages)
            nbytes = sum([tensor.nbytes for message in messages for tensor in incoming(message)])
        else:
            self.sizes = [_nbytes(message) for message in messages]
            pushes = isinstance(messages[0], Push)  # nothing comes back
            nbytes = sum(self.sizes) if pushes else sum([tensor_bytes(message) for message in messages])
        super().__init__(scheduler, ledger, operation, nbytes, _reason(messages[0]))
        self._finish = finish
        self.messages = list(messages)
        self.answers: list[Answer | None] = [None] * len(messages)
        self.missing = len(messages)  # answers
        self.decode_s = 0.0  # for each byte, if the messages are packets
        self.finite: bool | None = None  # whether all parts of a push are; None: each shard looks
        # evaluations take no time
        self.free = ledger.is_paused and not isinstance(messages[0], (Push, Reduce))

    def exchange_bytes(self, shard: int) -> int:
        """Return the bytes that a shard receives for this operation and sends."""
        message = self.messages[shard]  # of packets, what they were decoded to
        return self.sizes[shard] if isinstance(message, Push) else tensor_bytes(message)

    def take(self, shard: int, answer: Answer) -> bool:
        """Take a shard's answer; with the last one, fire with the result of all. Return whether it was."""
        self.answers[shard] = answer
        self.missing -= 1
        if not self.missing:
            self.complete(self._finish(self.answers))
        return not self.missing


Line = list[tuple[ShardRequest[Any], int]]
"""Messages that wait until earlier ones to the same host have left: each its request's, to one shard."""


def wait_in(line: Line, request: ShardRequest[Any], shard: int) -> None:
    """Add a message to a line: tensors at its end, a request for tensors right behind its shard's last."""
    place = len(line)
    if place and isinstance(request.messages[shard], (Pull, Save)):
        while place and line[place - 1][1] != shard:
            place -= 1
    line.insert(place, (request, shard))


def key(message: ClientMessage | Answer) -> Hashable:
    """Return a key by which a shard's answer is matched to its message."""
    match message:
        case Push() | PushAck():
            return "push", message.worker, message.clock
        case Pull() | PullReply():
            return "pull", message.worker
        case Reduce() | ReduceReply():
            return "reduce", message.worker, message.number
        case Save() | SaveReply():
            return "save", message.worker, message.part
        case _:
            return "load", message.worker


def surely_finite(messages: Sequence[ClientMessage]) -> bool | None:
    """Return True if the parts of a push are finite, by one sum for all shards; None: each shard looks.

    A sum of magnitudes bounds the sum by which a shard would decide.
    """
    if not isinstance(messages[0], Push):
        return None
    parts = [part for push in messages if isinstance(push, Push) and not push.codec for part in push.update]
    if len(parts) == 1:  # one shard looks at nothing else
        return is_finite(parts) or None
    same_dtype = len({part.dtype for part in parts}) == 1
    return (is_finite([torch.cat(parts).abs_()]) or None) if same_dtype else None


def _nbytes(message: ClientMessage) -> int:
    match message:
        case Push():
            return sum([tensor.nbytes for tensor in message.update])
        case Reduce():
            return message.tensor.nbytes
        case Load():
            return sum(tensor.nbytes for tensor in message.tensors)
        case _:
            return REQUEST_BYTES


def tensor_bytes(message: ClientMessage) -> int:
    """Return the bytes of tensors that travel with a message, and back with its answer."""
    outgoing = 0 if isinstance(message, (Pull, Save)) else _nbytes(message)
    return outgoing + sum([tensor.nbytes for tensor in incoming(message)])


def incoming(message: ClientMessage) -> Tensors:
    """Return the worker's memory for the answer."""
    match message:
        case Pull() | Save():
            return message.into
        case Reduce():
            return [message.tensor]
        case _:
            return []


def _reason(message: ClientMessage) -> str:
    """Describe what a worker waits for, to be shown on deadlock."""
    match message:
        case Push():
            return f"its push number {message.clock} to arrive"
        case Pull():
            return f"the server to admit it at clock {message.clock}"
        case Reduce():
            return f"the server to complete reduction number {message.number}"
        case _:
            return "the server's checkpoint"
