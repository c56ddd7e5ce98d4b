"""Serving: a process that holds one shard of the parameter server. A thread a link, one lock on the state.

Started beside each host's first worker by `attach`. It accepts workers as they knock, forgets those that die,
leave or fall silent, and ends when the last one has left, or when the process that started it is gone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from threading import Condition, Thread
from typing import Any

import torch
import torch.distributed as dist

from offbeat.messages import Answer, Join, Leave, Message, Pull, Push, Refusal, Reply, Tensors
from offbeat.server import ParameterServer
from offbeat.settings import build, pick
from offbeat.strategies import STRATEGIES
from offbeat.worlds.links import HEADER, NOW, SERVER, Kind, Link, challenge, finish, header

LOOK_S = 1.0  # how often to look whether those that others wait for are still there
KNOCK_S = 0.05  # how often to look whether somebody knocks
log = logging.getLogger("offbeat.server")


@dataclass(frozen=True)
class Post:
    """What a server process is told on its command line, as JSON."""

    host: str
    port: int
    prefix: str  # of the store
    shard: int
    parent: int  # the process that started this one
    workers: int  # that must have come before anybody goes on
    neighbours: list[int]  # the workers of this host: what they get does not leave the NIC
    strategy: str
    settings: dict[str, Any]
    sizes: list[tuple[str, int]]  # the flat tensors of this shard: dtype and number of elements
    timeout_s: float

    @property
    def silence_s(self) -> float:
        """How long a worker may say nothing, while others wait for it: shorter than they would wait."""
        return self.timeout_s / 2

    def buffers(self) -> Tensors:
        return [torch.zeros(numel, dtype=getattr(torch, dtype)) for dtype, numel in self.sizes]


class Shard:
    """The state machine, and the doors to it."""

    def __init__(self, post: Post, store: dist.Store, token: bytes) -> None:
        rule = build(pick("strategy", post.strategy, STRATEGIES), post.settings).rule()
        assert rule is not None
        self.post = post
        self.store = store
        self.token = token
        self.server = ParameterServer(post.buffers(), rule)
        self.doors: dict[int, Door] = {}
        self.sent_away = 0  # bytes that left this host
        self.filled = False  # the weights to start with are here
        self.known: set[int] = set()  # workers that have ever come
        self.changed = Condition()

    @property
    def complete(self) -> bool:
        """Whether all workers have come, be it that some have left again."""
        return len(self.known) >= self.post.workers

    @property
    def opened(self) -> bool:
        return self.filled and self.complete

    def tell(self, message: Message) -> None:
        """Hand a message to the state machine, and its answers to whom they are for. The lock is held."""
        for answer in self.server.handle(message):
            self.doors[answer.worker].answer(answer, self.server.weights)
        self.changed.notify_all()

    def forget_silent(self, waiting: int) -> None:
        """Somebody waits: take out of the clocks who has said nothing for too long. The lock is held."""
        too_long = time.monotonic() - self.post.silence_s
        for worker, door in list(self.doors.items()):
            if worker != waiting and not door.waits and door.heard_s < too_long:
                log.warning("shard %d: worker %d is silent, and forgotten", self.post.shard, worker)
                del self.doors[worker]
                self.tell(Leave(worker=worker))

    def admit(self, worker: int, prefix: str) -> None:
        """Make a link and serve it until it ends. Runs in a thread of its own."""
        link = None
        try:
            # A client of its own: one that waits for a key keeps all others from using it.
            client = self.store.clone()  # type: ignore[attr-defined]
            link = Link(client, prefix, SERVER, self.post.timeout_s)
            if not challenge(link, self.token):
                log.warning(
                    "shard %d: refused a stranger who called itself worker %d", self.post.shard, worker
                )
                return
            Door(self, worker, link).serve()
        except RuntimeError as gone:  # what gloo raises when the other end has died
            log.info("shard %d: lost worker %d: %s", self.post.shard, worker, gone)
        finally:
            if link is not None:
                link.close()

    def run(self) -> None:
        """Accept who knocks, until nobody is left to serve, or the one who started this died too soon."""
        number = 1
        while self.doors if self.complete else os.getppid() == self.post.parent:
            knock = f"knock/{self.post.shard}/{number}"
            if not self.store.check([knock]):
                time.sleep(KNOCK_S)
                continue
            asked = json.loads(self.store.get(knock))
            number += 1
            Thread(target=self.admit, args=(int(asked["worker"]), asked["prefix"]), daemon=True).start()


class Door:
    """One worker's link, as its thread sees it."""

    def __init__(self, shard: Shard, worker: int, link: Link) -> None:
        self.shard = shard
        self.worker = worker
        self.link = link
        self.update = shard.post.buffers()
        self.copy = shard.post.buffers()  # of the weights, as they were when this worker was let on
        self.reply: Reply | None = None
        self.refusals = 0
        self.heard_s = time.monotonic()
        self.waits = False  # to be let on: it has nothing to say

    def answer(self, answer: Answer, weights: Tensors) -> None:
        """The state machine has an answer for this worker. The lock is held."""
        if isinstance(answer, Refusal):
            log.warning("shard %d: refused worker %d: %s", self.shard.post.shard, self.worker, answer.reason)
            self.refusals += 1
            return
        torch._foreach_copy_(self.copy, weights)
        self.reply = answer

    def serve(self) -> None:
        shard = self.shard
        with shard.changed:
            shard.doors[self.worker] = self
            shard.known.add(self.worker)
            shard.tell(Join(worker=self.worker))
        try:
            while self._one():
                pass
        finally:
            with shard.changed:
                if shard.doors.get(self.worker) is self:  # and not already back through another door
                    del shard.doors[self.worker]
                    shard.tell(Leave(worker=self.worker))

    def _one(self) -> bool:
        """Serve one message; whether there will be more."""
        heard = torch.zeros(HEADER, dtype=torch.int64)
        finish(self.link.receive(heard))
        self.heard_s = time.monotonic()
        kind, clock = heard[0].item(), int(heard[1].item())
        shard = self.shard
        if kind == Kind.OPEN:
            finish(self.link.receive(*shard.server.weights))
            with shard.changed:
                shard.filled = True
                shard.changed.notify_all()
        elif kind == Kind.PUSH:
            finish(self.link.receive(*self.update))
            with shard.changed:
                shard.changed.wait_for(lambda: shard.opened)
                push = Push(worker=self.worker, clock=clock, update=self.update, at_s=self.heard_s)
                if shard.doors.get(self.worker) is self:
                    shard.tell(push)
        elif kind == Kind.PULL:
            self._let_on(None if clock == NOW else clock)
        return kind in (Kind.OPEN, Kind.PUSH, Kind.PULL)

    def _let_on(self, clock: int | None) -> None:
        shard = self.shard
        with shard.changed:
            shard.changed.wait_for(lambda: shard.opened)
            if shard.doors.get(self.worker) is not self:
                raise RuntimeError("forgotten: it was silent for too long")
            self.waits = True
            shard.tell(Pull(worker=self.worker, clock=clock))
            while not shard.changed.wait_for(lambda: self.reply is not None, LOOK_S):
                shard.forget_silent(self.worker)
            assert self.reply is not None
            behind, self.reply, self.waits = self.reply.behind, None, False
            self.heard_s = time.monotonic()  # it is its turn from now on
            if self.worker not in shard.post.neighbours:
                shard.sent_away += sum(part.nbytes for part in self.copy)
            sent_away = shard.sent_away
        finish(self.link.send(header(Kind.WEIGHTS, behind, sent_away, self.refusals), *self.copy))


def command(post: Post) -> list[str]:
    start = "from offbeat.worlds.serving import main; main()"
    return [sys.executable, "-c", start, json.dumps(asdict(post))]


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="offbeat server: %(message)s")
    torch.set_num_threads(1)
    post = Post(**json.loads(sys.argv[1]))
    client = dist.TCPStore(post.host, post.port, is_master=False, wait_for_workers=False)
    with torch.no_grad():
        Shard(post, dist.PrefixStore(post.prefix, client), os.environ["OFFBEAT_TOKEN"].encode()).run()
    os._exit(0)  # threads of links that are still ending hold nothing that is needed
