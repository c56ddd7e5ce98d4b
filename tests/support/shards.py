"""A shard with real links to it, from workers that a test plays by hand."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.server.messages import Join, Push
from offbeat.worlds.processes.server.auth import prove
from offbeat.worlds.processes.server.channel import ClientIdentity, ShardChannel
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.wire import HEADER, NEW, MessageType, encode_header
from tests.support import beside
from tests.support.conversations import SIZES as CONVERSATION_SIZES
from tests.support.limits import HANG_S

SIZES = [("float32", 4), ("float64", 2)]


def shard_of(folder: Path, strategy: str = "asp", **rest: Any) -> ShardServer:
    return ShardServer(beside.post(folder, SIZES, strategy, **rest), dist.HashStore(), b"secret")


def way_to(shard: ShardServer, worker: int, token: bytes = b"secret") -> ShardChannel:
    return ShardChannel(ClientIdentity(shard.store, "127.0.0.1", worker, token, HANG_S), 0, "shard 0")


class Hand:
    """A worker, by hand."""

    def __init__(self, shard: ShardServer, worker: int, clock: int | None = NEW) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.link = Connection(socket.create_connection(listener.getsockname()), HANG_S)
            self.served = beside.beside(shard.admit, listener.accept()[0])
        self.link.limit(HANG_S)
        assert prove(self.link, b"secret")
        if clock is not None:
            self.welcome = self.ask(MessageType.JOIN, worker, clock)[0]

    def say(self, kind: int, *rest: Any) -> None:
        numbers = [n for n in rest if isinstance(n, int)]
        self.link.send(encode_header(kind, *numbers), *[t for t in rest if isinstance(t, Tensor)])  # type: ignore[arg-type]

    def hear(self, *room: Tensor) -> list[int]:
        head = torch.zeros(HEADER, dtype=torch.int64)
        self.link.receive(head)
        while head[0] == MessageType.WAITING:  # on a busy machine; the answer follows
            self.link.receive(head)
        self.link.receive(*room)
        numbers: list[int] = head.tolist()
        return numbers[:-1]  # without the count of all workers' pushes

    def ask(self, kind: MessageType, *rest: Any) -> tuple[list[int], list[Tensor]]:
        """Say something, and hear the answer."""
        self.say(kind, *rest)
        weights = of(0.0) if kind is MessageType.PULL else []
        return self.hear(*weights), weights

    def leave(self) -> None:
        self.say(MessageType.LEAVE)
        self.served.result(HANG_S)
        self.link.close()

    def refused(self) -> bool:
        """The shard has closed the link."""
        self.served.result(HANG_S)
        with pytest.raises(ConnectionError):
            while True:
                self.hear()
        self.link.close()
        return True


def of(value: float) -> list[Tensor]:
    return [torch.full((4,), value), torch.full((2,), value, dtype=torch.float64)]


def served(shard: ShardServer, hand: Hand, clock: int) -> bool:
    """Whether a good worker is served its next step."""
    before = [weight.clone() for weight in shard.server.weights]
    assert hand.ask(MessageType.PUSH, clock, *of(0.5))[0] == [MessageType.PUSH_ACK, clock, 0, 0]
    head, weights = hand.ask(MessageType.PULL, clock)
    assert head[0] == MessageType.PULL_REPLY
    return all(torch.equal(new, old + 0.5) for new, old in zip(weights, before, strict=True))


def shard_config(folder: Path) -> ShardConfig:
    """Return what a shard is told that serves alone."""
    return beside.post(folder, CONVERSATION_SIZES)


def serving_one(config: ShardConfig) -> ShardServer:
    """Return a shard that worker 0 has joined, without a link."""
    shard = ShardServer(config, dist.HashStore(), b"secret")
    shard.attendance.note(0, 0)
    with shard.changed:
        shard.dispatch(Join(worker=0))
    return shard


def pushed(shard: ShardServer, clock: int) -> None:
    """Push ones from worker 0."""
    update = [torch.ones_like(weight) for weight in shard.server.weights]
    with shard.changed:
        shard.dispatch(Push(worker=0, clock=clock, update=update))
