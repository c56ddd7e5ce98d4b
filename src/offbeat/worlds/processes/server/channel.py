"""Way: one worker's way to one shard of the server: a link, and what is under way on it.

When the link fails (the shard crashed, the network did), the way is mended: a new link is made, and what was
under way is sent again. A shard that already has a push knows it by its clock, so nothing is folded in twice.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import OffbeatError, RankLost
from offbeat.worlds.processes.server.discovery import resolve
from offbeat.worlds.processes.server.wire import (
    HEADER,
    NEW,
    TOKEN,
    Connection,
    MessageType,
    encode_header,
    prove,
)

LISTEN_S = 0.02
START_S = 30.0  # what a shard's process may take to start, however short the timeout: it imports torch
MOST_PATIENCE_S = 2.0  # between attempts; it grows from 0, and is 0 again once an answer has come
GREETING_S = 10.0  # what a shard may take to let a worker in, before that one tries again
GOODBYE_S = 5.0
log = logging.getLogger("offbeat")


@dataclass(frozen=True)
class ClientIdentity:
    """Who asks for links: a worker, and what it needs to find shards and to be let in."""

    store: dist.Store
    host: str  # of the store, as this worker knows it
    worker: int
    token: bytes
    timeout_s: float


@dataclass(eq=False)
class Request:
    """A message to a shard and room for its answer."""

    message: list[Tensor]
    answer: list[Tensor]
    await_ready: Callable[[], None] = lambda: None  # until the message can be read: it may come from a GPU
    done: bool = False
    began_s: float = 0.0  # when it was sent last
    ended_s: float = 0.0  # when its answer had come

    @property
    def head(self) -> list[int]:
        numbers: list[int] = self.answer[0].tolist()
        return numbers


class Pipeline:
    """A link at work: one thread sends errands, another takes in their answers, both in order.

    So a worker goes on while its update travels, and neither end waits for the other to have read.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._broken: OSError | None = None
        self._changed = Condition()
        self._outgoing: SimpleQueue[Request | None] = SimpleQueue()
        self._incoming: SimpleQueue[Request | None] = SimpleQueue()
        self._sender = Thread(target=self._work, args=(self._outgoing, self._send), daemon=True)
        self._receiver = Thread(target=self._work, args=(self._incoming, self._receive), daemon=True)
        self._sender.start()
        self._receiver.start()

    def take(self, errand: Request) -> None:
        errand.done = False
        self._outgoing.put(errand)
        self._incoming.put(errand)

    def wait(self, errand: Request, patience_s: float) -> None:
        """Until the answer is there; raises what keeps it from coming."""
        with self._changed:
            if not self._changed.wait_for(lambda: errand.done or self._broken, max(0.0, patience_s)):
                raise TimeoutError("it does not answer")
            if not errand.done:
                assert self._broken is not None
                raise self._broken

    def close(self, last_words: Request | None = None) -> None:
        if last_words is not None:
            self._outgoing.put(last_words)
            self._outgoing.put(None)
            self._sender.join(GOODBYE_S)
        self._outgoing.put(None)
        self._incoming.put(None)
        self._link.end()
        self._sender.join()
        self._receiver.join()
        self._link.close()

    def _work(self, errands: SimpleQueue[Request | None], carry: Callable[[Request], None]) -> None:
        try:
            while (errand := errands.get()) is not None:
                carry(errand)
        except OSError as broken:
            with self._changed:
                self._broken = self._broken or broken
                self._changed.notify_all()
            self._link.end()  # the other thread need not wait any longer either

    def _send(self, errand: Request) -> None:
        errand.await_ready()
        errand.began_s = time.monotonic()
        self._link.send(*errand.message)

    def _receive(self, errand: Request) -> None:
        self._link.receive(*errand.answer)
        errand.ended_s = time.monotonic()
        with self._changed:
            errand.done = True
            self._changed.notify_all()


class ShardChannel:
    def __init__(self, caller: ClientIdentity, shard: int, where: str) -> None:
        self.where = where  # in words, for messages
        self.clock = NEW  # as acknowledged by the shard
        self.pushes = 0  # that it has acknowledged
        self.filled = False  # the shard has weights
        self._caller = caller
        self._shard = shard
        self._under_way: list[Request] = []
        self._line: Pipeline | None = None
        self._patience_s = 0.0
        self._starts_by = time.monotonic() + START_S
        self._open(time.monotonic() + caller.timeout_s)

    def start(self, errand: Request) -> Request:
        self._under_way.append(errand)
        if self._line is not None:  # else whoever waits for the answer mends the way
            self._line.take(errand)
        return errand

    def finish(self, errand: Request, deadline: float) -> RankLost | None:
        """Wait for the answer, mending the way where that is needed; what stands in the way of it, if so."""
        while True:
            try:
                if self._line is None:
                    raise ConnectionError("there is no link")
                self._line.wait(errand, deadline - time.monotonic())
                self._under_way.remove(errand)
                self._patience_s = 0.0
                self.filled = True  # without weights it would not have answered
                return None
            except OSError as failed:
                if time.monotonic() > deadline:
                    return RankLost(f"{self.where} did not answer for {self._caller.timeout_s:.0f} s")
                log.warning("the way to %s is broken: mending it", self.where)
                log.debug("it broke by %s", failed)
            lost = self._mend(deadline)
            if lost is not None:
                return lost

    def leave(self) -> None:
        """Say goodbye, if there is somebody to say it to."""
        if self._line is not None:
            self._line.close(Request([encode_header(MessageType.LEAVE)], []))
            self._line = None

    def _mend(self, deadline: float) -> RankLost | None:
        had_weights = self.filled
        if self._line is not None:
            self._line.close()
            self._line = None
        try:
            self._open(deadline)
        except RankLost as lost:
            return lost
        if had_weights and not self.filled:
            return RankLost(f"{self.where} crashed before it had a snapshot: its weights are lost")
        assert self._line is not None
        for errand in self._under_way:
            self._line.take(errand)
        return None

    def _open(self, deadline: float) -> None:
        """Make a link, prove who we are, and join, be it after several attempts."""
        while True:
            time.sleep(min(self._patience_s, max(0.0, deadline - time.monotonic())))
            self._patience_s = min(MOST_PATIENCE_S, 2 * self._patience_s + LISTEN_S)
            link = None
            try:
                link = self._connect(deadline)
                self._join(link)
                self._line = Pipeline(link)
                return
            except (OSError, RuntimeError) as failed:  # RuntimeError: the store has gone
                if link is not None:
                    link.close()
                if isinstance(failed, OffbeatError):
                    raise
                if time.monotonic() > deadline:
                    raise RankLost(f"{self.where} cannot be reached: {failed}") from failed

    def _connect(self, deadline: float) -> Connection:
        caller, asked = self._caller, time.monotonic()
        while (address := resolve(caller.store, self._shard, caller.host)) is None:
            if time.monotonic() > max(deadline, self._starts_by):
                raise TimeoutError(f"it has not started within {time.monotonic() - asked:.0f} s")
            time.sleep(LISTEN_S)
        deadline += time.monotonic() - asked  # what it took to start is not held against it
        patience_s = min(GREETING_S, max(LISTEN_S, deadline - time.monotonic()))
        link = Connection(socket.create_connection(address, timeout=patience_s), caller.timeout_s / 2)
        link.limit(patience_s)
        return link

    def _join(self, link: Connection) -> None:
        if not prove(link, self._caller.token):
            raise OffbeatError(f"{self.where} does not know this worker's token: check {TOKEN}")
        heard = torch.zeros(HEADER, dtype=torch.int64)
        link.send(encode_header(MessageType.JOIN, self._caller.worker, self.clock, self.pushes))
        link.receive(heard)
        _, self.clock, _, filled = heard.tolist()
        self.filled = bool(filled)
        link.limit(None)
