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

import torch
import torch.distributed as dist

from offbeat.errors import OffbeatError
from offbeat.messages import (
    Answer,
    Join,
    Leave,
    Message,
    Pull,
    Push,
    Receipt,
    Reply,
    Tensors,
    Term,
    Tick,
    Total,
    Welcome,
)
from offbeat.packets import pack, room, unpack
from offbeat.port import Op
from offbeat.server import Memory, is_finite
from offbeat.server_optimizer import OptimizerPlan, ServerOptimizer
from offbeat.settings import build, pick
from offbeat.strategies import STRATEGIES
from offbeat.worlds.addresses import listen
from offbeat.worlds.links import (
    NEW,
    NOW,
    WAYS_TO_SUM,
    Kind,
    Link,
    Malformed,
    challenge,
    header,
    hear,
    room_for_terms,
)
from offbeat.worlds.post import Post
from offbeat.worlds.snapshots import Snapshots, copy_into

LOOK_S = 1.0  # how often to look whether those that others wait for are still there
ACCEPT_S = 0.05  # how often to look, beside waiting for newcomers, whether it is over
GREETING_S = 10.0  # what a newcomer may take to prove itself
log = logging.getLogger("offbeat.server")


class Shard:
    """The state machine, and the doors to it."""

    def __init__(self, post: Post, store: dist.Store, token: bytes) -> None:
        self.post = post
        self.strategy = build(pick("strategy", post.strategy, STRATEGIES), post.settings)
        self.store = store
        self.token = token
        self.snapshots = Snapshots(Path(post.snapshot), post.snapshot_s)
        memory = self.snapshots.read()
        again = memory is not None
        empty = post.buffers()
        if memory is not None and _layout(memory.weights) != _layout(empty):
            raise OffbeatError(f"{post.snapshot} is a snapshot of another model: move it away to start anew")
        memory = memory or Memory(empty)
        self.server = self.strategy.server(memory, post.folding())
        self.parts = len(OptimizerPlan(**post.optimizer).parts()) if post.optimizer else 0
        self.doors: dict[int, Door] = {}
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

    def await_answer(self, door: Door, given: Callable[[], bool]) -> None:
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

    def enter(self, door: Door, clock: int | None, pushes: int) -> None:
        """A worker comes in, and waits to be answered."""
        with self.changed:
            if door.worker in self.doors:  # it came back before it was missed
                self.doors[door.worker].link.end()
            self.doors[door.worker] = door
            self.known.add(door.worker)
            self.tell(Join(worker=door.worker, clock=clock, pushes=pushes))

    def exit(self, door: Door, said_goodbye: bool) -> None:
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
        link, who = Link(connection, self.post.silence_s), "a newcomer"
        try:
            link.limit(GREETING_S)
            if not challenge(link, self.token):
                log.warning("shard %d: refused a stranger, who does not know the token", self.post.shard)
                return
            kind, worker, clock, pushes = hear(link)
            who = f"worker {worker}"
            if kind is not Kind.JOIN:
                raise Malformed(f"{kind.name} before JOIN")
            link.limit(None)
            Door(self, worker, link).serve(None if clock == NEW else clock, pushes)
        except Malformed as nonsense:
            log.warning("shard %d: refused %s: it sent %s", self.post.shard, who, str(nonsense))
        except OSError as gone:
            log.info("shard %d: lost %s: %s", self.post.shard, who, str(gone))
        finally:
            link.close()

    def run(self) -> None:
        """Accept who comes, until nobody is left to serve."""
        with listen(self.store, self.post.shard, self.post.host, self.post.port) as listener:
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


class Door:
    """One worker's link, as its thread sees it."""

    def __init__(self, shard: Shard, worker: int, link: Link) -> None:
        self.shard = shard
        self.worker = worker
        self.link = link
        self.figures = shard.post.figures(shard.server.rule.figures)
        self.update = shard.post.buffers()
        self.copy = shard.post.buffers()  # of the weights, as they were when this worker was let on
        self.packets = [room(codec, self.update) for codec in shard.strategy.forms]
        answered_in = shard.strategy.answered_in
        self.coded = room(answered_in, self.copy) if answered_in else None
        sums = shard.server.rule.sums
        self.term = torch.zeros(room_for_terms(self.update) if sums else 0, dtype=torch.uint8)
        self.part = self.term
        self.total: Total | None = None
        self.welcome: Welcome | None = None
        self.receipt: Receipt | None = None
        self.reply: Reply | None = None
        self.heard_s = time.monotonic()
        self.pushed = False
        self.waits = False  # to be answered: it has nothing to say

    def answer(self, answer: Answer) -> None:
        """The state machine has an answer for this worker. The lock is held."""
        match answer:
            case Welcome():
                self.welcome = answer
            case Receipt():
                self.receipt = answer
            case Reply():
                torch._foreach_copy_(self.copy, answer.weights)
                self.reply = answer
                self._count(sum(part.nbytes for part in self._outgoing(answer)))
            case Total():
                self.part.copy_(answer.tensor)
                self.total = answer
                self._count(self.part.nbytes)

    def _count(self, nbytes: int) -> None:
        if self.worker not in self.shard.post.neighbours:
            self.shard.sent_away += nbytes

    def _outgoing(self, reply: Reply) -> Tensors:
        """What travels of the weights that were copied; it may still have to be packed."""
        return self.copy if self.coded is None or reply.whole else self.coded

    def serve(self, clock: int | None, pushes: int) -> None:
        said_goodbye = False
        self.shard.enter(self, clock, pushes)
        try:
            self._greet()
            while not said_goodbye:
                said_goodbye = self._one()
        finally:
            self.shard.exit(self, said_goodbye)

    def _greet(self) -> None:
        assert self.welcome is not None
        clock, lost = self.welcome.clock, self.welcome.lost
        if lost:
            nbytes = lost * sum(part.nbytes for part in self.update)
            said = "shard %d: %d updates of worker %d since the last snapshot are lost (%.1f MB)"
            log.warning(said, self.shard.post.shard, lost, self.worker, nbytes / 1e6)
        self.link.send(header(Kind.WELCOME, clock, lost, int(self.shard.filled)))

    def _one(self) -> bool:
        """Serve one message; whether it was the last."""
        kind, first, second, third = hear(self.link)
        self.heard_s = time.monotonic()
        match kind:
            case Kind.OPEN:
                self._check_part(first)
                if not self._receive():
                    raise Malformed("weights that are not finite")
                self.shard.fill(self.update, first)
                self.link.send(header(Kind.RECEIPT))
            case Kind.PUSH:
                self._take(first, second / 1e9, third)
            case Kind.PULL:
                self._check_part(second)
                self._let_on(None if first == NOW else first, second)
            case Kind.TERM:
                self._sum(first, second, *WAYS_TO_SUM[third])
            case Kind.JOIN:
                raise Malformed("JOIN twice")
        return kind is Kind.LEAVE

    def _receive(self, form: int = 0) -> bool:
        """Take in an update; whether it is finite, looked at piece by piece while the next one comes."""
        if form:
            return self._receive_packets(form)
        finite = True
        for piece in self.link.coming(*self.update):
            finite = finite and is_finite([piece])
            self.heard_s = time.monotonic()
        return finite

    def _receive_packets(self, form: int) -> bool:
        if form > len(self.packets):
            raise Malformed(f"a push in form {form}")
        self.link.receive(*self.packets[form - 1])
        try:
            unpack(self.shard.strategy.forms[form - 1], self.packets[form - 1], self.update)
        except OffbeatError as nonsense:
            raise Malformed(str(nonsense)) from nonsense
        return is_finite(self.update)

    def _take(self, clock: int, spent_s: float, form: int) -> None:
        self.link.receive(self.figures)
        finite = self._receive(form) and bool(self.figures.isfinite().all())
        with self.shard.changed:
            self._await_opening()
            # A newcomer's first clock is the highest that any shard gave it; from then on none is left out.
            if self.pushed and clock > self.shard.server.memory.applied[self.worker] + 1:
                raise Malformed(f"push {clock} before those that go before it")
            self.pushed, self.receipt = True, None
            push = Push(
                worker=self.worker,
                clock=clock,
                update=self.update,
                figures=tuple(self.figures.tolist()),
                finite=finite,
                at_s=self.heard_s,
                spent_s=spent_s,
            )
            self._ask(push, lambda: self.receipt is not None)
            assert self.receipt is not None
            refused = self.receipt.refused
            # Where pushes wait for each other, whatever was asked for before has been answered.
            sent_away = self.shard.sent_away if self.shard.server.rule.together else 0
        if refused:
            log.warning("shard %d: refused worker %d: %s", self.shard.post.shard, self.worker, refused)
        self.link.send(header(Kind.RECEIPT, clock, int(bool(refused)), sent_away))

    def _sum(self, number: int, numel: int, dtype: torch.dtype, op: Op) -> None:
        nbytes = numel * dtype.itemsize
        if not self.shard.server.rule.sums or nbytes > self.term.nbytes:
            raise Malformed(f"{numel} elements, for which there is no room")
        self.part = self.term[:nbytes].view(dtype)
        for _ in self.link.coming(self.part):
            self.heard_s = time.monotonic()
        with self.shard.changed:
            self._await_opening()
            if not self.shard.server.sums.expects(self.worker, number):
                raise Malformed(f"a term of sum {number}, in which it has no part any more")
            self.total = None
            term = Term(worker=self.worker, number=number, op=op, tensor=self.part)
            self._ask(term, lambda: self.total is not None)
            sent_away = self.shard.sent_away
        self.link.send(header(Kind.TOTAL, number, sent_away), self.part)

    def _check_part(self, part: int) -> None:
        if part > self.shard.parts:
            raise Malformed(f"part {part} of what has {self.shard.parts}")

    def _let_on(self, clock: int | None, part: int) -> None:
        shard = self.shard
        with shard.changed:
            self._await_opening()
            self.reply = None
            self._ask(Pull(worker=self.worker, clock=clock, part=part), lambda: self.reply is not None)
            assert self.reply is not None
            reply, sent_away = self.reply, shard.sent_away
        outgoing = self._outgoing(reply)
        if outgoing is self.coded and (codec := shard.strategy.answered_in):
            pack(codec, self.copy, outgoing, reply.behind, remainder=False)
        self.link.send(header(Kind.WEIGHTS, reply.behind, sent_away, reply.hint), *outgoing)

    def _ask(self, message: Message, answered: Callable[[], bool]) -> None:
        """Hand a message to the state machine, and wait until it is answered. The lock is held."""
        self.shard.tell(message)
        if not answered():
            self.waits = True
            self.shard.await_answer(self, answered)
            self._check_open()
            self.waits = False
        self.heard_s = time.monotonic()  # it is its turn from now on

    def _await_opening(self) -> None:
        """Until all have come. The lock is held."""
        shard = self.shard
        if not shard.changed.wait_for(lambda: shard.opened, shard.post.timeout_s):
            came, expected = len(shard.known), shard.post.workers
            log.warning("shard %d: only %d of %d workers have come", shard.post.shard, came, expected)
            raise ConnectionAbortedError("not all workers have come")
        self._check_open()

    @property
    def open(self) -> bool:
        return self.shard.doors.get(self.worker) is self

    def _check_open(self) -> None:
        if not self.open:
            raise ConnectionAbortedError("forgotten: it was silent for too long, or came in by another door")
