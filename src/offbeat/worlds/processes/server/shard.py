"""Serving: a process that holds one shard of the parameter server. A thread a link, one lock on the state.

It accepts workers as they come, forgets those that die, leave or fall silent, and writes a snapshot every so
often. After a crash its keeper starts it again; it goes on from the snapshot, and workers come back by
themselves. It ends when all workers have said goodbye, or when nobody is left who could come back.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch.distributed as dist

from offbeat.core.settings import build, lookup
from offbeat.errors import OffbeatError
from offbeat.server.messages import Join, Leave, Message, Tensors, Tick
from offbeat.server.optimizer_spec import OptimizerSpec, ServerOptimizer
from offbeat.server.server import ShardState
from offbeat.strategies import STRATEGIES
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.discovery import register
from offbeat.worlds.processes.server.session import WorkerSession
from offbeat.worlds.processes.server.snapshots import Snapshots, copy_into
from offbeat.worlds.processes.server.wire import (
    NEW,
    Connection,
    MessageType,
    ProtocolError,
    challenge,
    read_header,
)

LOOK_S = 1.0  # how often to look whether those that others wait for are still there
ACCEPT_S = 0.05  # how often to look, beside waiting for newcomers, whether it is over
GREETING_S = 10.0  # what a newcomer may take to prove itself
log = logging.getLogger("offbeat.server")


class ShardServer:
    """The state machine, and the doors to it."""

    def __init__(self, post: ShardConfig, store: dist.Store, token: bytes) -> None:
        self.post = post
        self.strategy = build(lookup("strategy", post.strategy, STRATEGIES), post.settings)
        self.store = store
        self.token = token
        self.snapshots = Snapshots(Path(post.snapshot), post.snapshot_s)
        memory = self.snapshots.read()
        again = memory is not None
        empty = post.buffers()
        if memory is not None and _layout(memory.weights) != _layout(empty):
            raise OffbeatError(f"{post.snapshot} is a snapshot of another model: move it away to start anew")
        memory = memory or ShardState(empty)
        self.server = self.strategy.server(memory, post.folding())
        self.parts = len(OptimizerSpec(**post.optimizer).parts()) if post.optimizer else 0
        self.doors: dict[int, WorkerSession] = {}
        self.sent_away = 0  # bytes that left this host
        self.filled = again  # there are weights
        self.known: set[int] = set(memory.applied)  # workers that have ever come
        self.finished = False  # the last one to go said goodbye
        self.alone_since = time.monotonic()  # since the last one went
        self.changed = Condition()
        if again:
            log.warning("shard %d: starts again from its snapshot", post.shard)
            self.snapshots.start(self._take)

    @property
    def opened(self) -> bool:
        """Whether there are weights, and all workers have come (be it that some have left again)."""
        return self.filled and len(self.known) >= self.post.workers

    def tell(self, message: Message) -> None:
        """Hand a message to the state machine, and its answers to whom they are for. The lock is held."""
        for answer in self.server.handle(message):
            if answer.worker in self.doors:
                self.doors[answer.worker].answer(answer)
        self.changed.notify_all()

    def await_answer(self, door: WorkerSession, given: Callable[[], bool]) -> None:
        """Until this door's worker has its answer, or the door is closed. The lock is held.

        Who waits looks after what ends a wait: the rule's deadline, and the silence of others.
        """
        while not given():
            now_s, look_s = time.monotonic(), LOOK_S
            wake_at = self.server.rule.wake_at(self.server.state)
            if wake_at is not None and wake_at <= now_s:
                self.tell(Tick(at_s=now_s))
            elif wake_at is not None:
                look_s = min(LOOK_S, wake_at - now_s)
            if self.changed.wait_for(lambda: given() or not door.open, look_s):
                return
            self.forget_silent(door.worker)

    def fill(self, weights: Tensors, part: int = 0) -> None:
        """Take the weights to start with, or to start again with; or a part of what the optimizer keeps."""
        if part:
            fold = self.server.fold
            assert isinstance(fold, ServerOptimizer)
            with self.changed:
                fold.keep(part, weights)
            return
        with self.changed:
            self.server.restart(weights)
            first, self.filled = not self.filled, True
            self.changed.notify_all()
        if first:
            Thread(target=self.snapshots.start, args=(self._take,), daemon=True).start()
        else:  # the last snapshot is of other weights, and counts by other clocks
            self.snapshots.write(self._take)

    def enter(self, door: WorkerSession, clock: int | None, pushes: int) -> None:
        """A worker comes in, and waits to be answered."""
        with self.changed:
            if door.worker in self.doors:  # it came back before it was missed
                self.doors[door.worker].link.end()
            self.doors[door.worker] = door
            self.known.add(door.worker)
            self.tell(Join(worker=door.worker, clock=clock, pushes=pushes))

    def exit(self, door: WorkerSession, said_goodbye: bool) -> None:
        with self.changed:
            if self.doors.get(door.worker) is door:  # and not already back through another door
                self._forget(door.worker, said_goodbye)

    def forget_silent(self, waiting: int) -> None:
        """Somebody waits: take out of the clocks who has said nothing for too long. The lock is held."""
        too_long = time.monotonic() - self.post.silence_s
        for worker, door in list(self.doors.items()):
            if worker != waiting and not door.waits and door.heard_s < too_long:
                log.warning("shard %d: worker %d is silent, and forgotten", self.post.shard, worker)
                self._forget(worker, said_goodbye=False)

    def _forget(self, worker: int, said_goodbye: bool) -> None:
        self.doors.pop(worker).link.end()
        self.finished = said_goodbye
        self.alone_since = time.monotonic()
        self.tell(Leave(worker=worker, at_s=self.alone_since))

    def admit(self, connection: socket.socket) -> None:
        """Serve one who came, until the link ends. Runs in a thread of its own."""
        link, who = Connection(connection, self.post.silence_s), "a newcomer"
        try:
            link.limit(GREETING_S)
            if not challenge(link, self.token):
                log.warning("shard %d: refused a stranger, who does not know the token", self.post.shard)
                return
            kind, worker, clock, pushes = read_header(link)
            who = f"worker {worker}"
            if kind is not MessageType.JOIN:
                raise ProtocolError(f"{kind.name} before JOIN")
            link.limit(None)
            WorkerSession(self, worker, link).serve(None if clock == NEW else clock, pushes)
        except ProtocolError as nonsense:
            log.warning("shard %d: refused %s: it sent %s", self.post.shard, who, str(nonsense))
        except OSError as gone:
            log.info("shard %d: lost %s: %s", self.post.shard, who, str(gone))
        finally:
            link.close()

    def run(self) -> None:
        """Accept who comes, until nobody is left to serve."""
        with register(self.store, self.post.shard, self.post.host, self.post.port) as listener:
            listener.settimeout(ACCEPT_S)
            while not self._over():
                with suppress(TimeoutError):
                    Thread(target=self.admit, args=listener.accept()[:1], daemon=True).start()
        if self.post.dedicated and self.filled:
            self.snapshots.write(self._take)
        self.snapshots.end(keep=self.post.dedicated)

    def _over(self) -> bool:
        with self.changed:
            if self.doors:
                return False
            if os.getppid() != self.post.parent:  # and nobody else would start it again
                return True
            if len(self.known) < self.post.workers:
                return False  # they have yet to come
            waited_s = time.monotonic() - self.alone_since  # for somebody to come back
            return self.finished or (waited_s > self.post.timeout_s and not self.post.dedicated)

    def _take(self, copy: Tensors) -> dict[int, int]:
        with self.changed:
            copy_into(copy, self.server.weights)
            return self.server.held


def _layout(weights: Tensors) -> list[tuple[Any, Any]]:
    return [(weight.shape, weight.dtype) for weight in weights]
