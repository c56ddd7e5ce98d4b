"""ShardServer: the process that holds one shard of the parameter server.

A thread serves each connection, and one lock guards the state. The shard accepts workers whenever they
connect, removes workers that die, leave or fall silent, and writes a snapshot at regular intervals. After a
crash its supervisor starts it again; it continues from the snapshot, and workers reconnect by themselves. The
shard ends when all workers have left, or when no worker could reconnect any more.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch.distributed as dist

from offbeat.core.settings import build, lookup
from offbeat.errors import OffbeatError
from offbeat.server.messages import (
    ClientMessage,
    Join,
    Leave,
    Load,
    Message,
    Push,
    Reduce,
    Tensors,
    Tick,
)
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.strategies import STRATEGIES
from offbeat.worlds.processes.server.auth import challenge
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.discovery import register
from offbeat.worlds.processes.server.session import WorkerSession
from offbeat.worlds.processes.server.snapshots import Snapshots
from offbeat.worlds.processes.server.wire import NEW, MessageType, ProtocolError, read_header

CHECK_S = 1.0  # between checks that the workers which others wait for are still alive
ACCEPT_S = 0.05  # between checks, while waiting for connections, whether the shard may end
JOIN_TIMEOUT_S = 10.0  # for a new connection to authenticate and join
log = logging.getLogger("offbeat.server")


class ShardServer:
    """The state machine of one shard, and the sessions of its workers."""

    def __init__(self, config: ShardConfig, store: dist.Store, token: bytes) -> None:
        self.config = config
        strategy = build(lookup("strategy", config.strategy, STRATEGIES), config.settings)
        half = strategy.server_half()
        if half is None:
            raise OffbeatError(f"{config.strategy} has no parameter server with these settings")
        self.half = half
        self.store = store
        self.token = token
        self.snapshots = Snapshots(Path(config.snapshot), config.snapshot_s)
        saved = self.snapshots.read()
        empty = config.buffers()
        parts = config.state_parts
        if saved is not None and (
            _layout(saved.weights) != _layout(empty) or len(saved.optimizer) not in (0, parts)
        ):
            raise OffbeatError(
                f"{config.snapshot} is a snapshot of another model: move it away to start anew"
            )
        state = saved or ShardState(empty)
        self.server = ParameterServer(state, half, config.make_apply())
        self.sessions: dict[int, WorkerSession] = {}
        self.remote_bytes = 0  # sent to workers on other hosts
        self.has_weights = saved is not None
        self.seen_workers: set[int] = set(state.applied)  # all workers that have ever joined
        self.finished = False  # whether the last worker that left had sent LEAVE
        self.alone_since = time.monotonic()  # when the last worker left
        self.changed = Condition()  # its lock guards the state
        if saved is not None:
            log.warning("shard %d: starts again from its snapshot", config.shard)
            self.snapshots.start(self._copy_state)

    @property
    def opened(self) -> bool:
        """True if the shard has weights and all workers have joined, even if some have left again."""
        return self.has_weights and len(self.seen_workers) >= self.config.workers

    # --- what sessions call

    def join(self, session: WorkerSession, clock: int | None, pushes: int) -> bool:
        with self.changed:
            if session.worker in self.sessions:  # it reconnected before its old connection was found dead
                self.sessions[session.worker].connection.end()
            self.sessions[session.worker] = session
            self.seen_workers.add(session.worker)
            self.dispatch(Join(worker=session.worker, clock=clock, pushes=pushes))
            return self.has_weights

    def leave(self, session: WorkerSession, announced: bool) -> None:
        with self.changed:
            if self._is_open(session):  # the worker has no newer connection
                self._remove(session.worker, announced)

    def request(self, session: WorkerSession, message: ClientMessage) -> int:
        with self.changed:
            self._wait_for_workers(session)
            self._check(session, message)
            session.expect(message)
            self.dispatch(message)
            if not session.answered:
                session.waits = True
                self.wait_for_reply(session)
                self._check_open(session)
                session.waits = False
            session.heard_s = time.monotonic()  # the worker's silence counts from now on
            return self.remote_bytes

    def load_weights(self, tensors: Tensors, part: int = 0) -> None:
        with self.changed:
            self.server.handle(Load(worker=-1, part=part, tensors=tensors))
            if part:
                return
            first, self.has_weights = not self.has_weights, True
            self.changed.notify_all()
        if first:
            Thread(target=self.snapshots.start, args=(self._copy_state,), daemon=True).start()
        else:  # the last snapshot has the old weights and clocks
            self.snapshots.write_anew(self._copy_state)

    # --- called with the lock held

    def dispatch(self, message: Message) -> None:
        """Hand a message to the state machine, and its answers to the sessions of their workers."""
        for answer in self.server.handle(message):
            if answer.worker in self.sessions:
                nbytes = self.sessions[answer.worker].answer(answer)
                if answer.worker not in self.config.local_workers:
                    self.remote_bytes += nbytes
        self.changed.notify_all()

    def wait_for_reply(self, session: WorkerSession) -> None:
        """Wait until the session's worker has its answer, or the session is closed.

        Meanwhile the waiting thread wakes the aggregation when it is due, and removes silent workers.
        """
        while not session.answered:
            now_s, patience_s = time.monotonic(), CHECK_S
            wake_at = self.server.aggregation.wake_at(self.server.state)
            if wake_at is not None and wake_at <= now_s:
                self.dispatch(Tick(at_s=now_s))
            elif wake_at is not None:
                patience_s = min(CHECK_S, wake_at - now_s)
            if self.changed.wait_for(lambda: session.answered or not self._is_open(session), patience_s):
                return
            self.remove_silent(session.worker)

    def remove_silent(self, waiting: int) -> None:
        """Remove the workers that have sent nothing for too long, while worker `waiting` waits."""
        too_long = time.monotonic() - self.config.silence_s
        for worker, session in list(self.sessions.items()):
            if worker != waiting and not session.waits and session.heard_s < too_long:
                log.warning("shard %d: worker %d is silent, removed", self.config.shard, worker)
                self._remove(worker, announced=False)

    def _wait_for_workers(self, session: WorkerSession) -> None:
        if not self.changed.wait_for(lambda: self.opened, self.config.timeout_s):
            joined, expected = len(self.seen_workers), self.config.workers
            log.warning("shard %d: only %d of %d workers have joined", self.config.shard, joined, expected)
            raise ConnectionAbortedError("not all workers have joined")
        self._check_open(session)

    def _check(self, session: WorkerSession, message: ClientMessage) -> None:
        """Raise ProtocolError for a message out of order."""
        match message:
            case Push():
                # A new worker's first clock is the highest that any shard gave it; later clocks have no gaps.
                latest = self.server.shard.applied[message.worker]
                if session.pushed and message.clock > latest + 1:
                    raise ProtocolError(f"push {message.clock} before push {message.clock - 1}")
                session.pushed = True
            case Reduce():
                if not self.server.aggregation.expects(message.worker, message.number):
                    raise ProtocolError(
                        f"a tensor for reduction {message.number}, which ended without this worker"
                    )

    def _is_open(self, session: WorkerSession) -> bool:
        return self.sessions.get(session.worker) is session

    def _check_open(self, session: WorkerSession) -> None:
        if not self._is_open(session):
            raise ConnectionAbortedError("the worker was removed as silent, or has reconnected")

    def _remove(self, worker: int, announced: bool) -> None:
        self.sessions.pop(worker).connection.end()
        self.finished = announced
        self.alone_since = time.monotonic()
        self.dispatch(Leave(worker=worker, at_s=self.alone_since))

    # --- connections

    def run(self) -> None:
        """Accept connections until no worker is left to serve."""
        config = self.config
        with register(self.store, config.shard, config.host, config.tcp_port) as listener:
            listener.settimeout(ACCEPT_S)
            while not self._may_end():
                with suppress(TimeoutError):
                    Thread(target=self.admit, args=listener.accept()[:1], daemon=True).start()
        written = True
        if config.dedicated and self.has_weights:
            written = self.snapshots.write_last(self._copy_state, config.timeout_s)
        self.snapshots.end(keep=config.dedicated)
        if not written:
            raise OffbeatError(
                f"the final weights could not be written to {config.snapshot} for {config.timeout_s:.0f} s, "
                "and are lost; an older snapshot may be there"
            )

    def admit(self, accepted: socket.socket) -> None:
        """Serve a connection until it ends. Runs in a thread of its own."""
        connection, name = Connection(accepted, self.config.silence_s), "a new connection"
        try:
            connection.limit(JOIN_TIMEOUT_S)
            if not challenge(connection, self.token):
                log.warning("shard %d: refused a connection with another token", self.config.shard)
                return
            kind, worker, clock, pushes = read_header(connection)
            name = f"worker {worker}"
            if kind is not MessageType.JOIN:
                raise ProtocolError(f"{kind.name} before JOIN")
            connection.limit(None)
            session = WorkerSession(self, self.config, self.half, self.server.aggregation, worker, connection)
            session.serve(None if clock == NEW else clock, pushes)
        except ProtocolError as malformed:
            log.warning("shard %d: refused %s: it sent %s", self.config.shard, name, str(malformed))
        except OSError as lost:
            log.info("shard %d: connection to %s lost: %s", self.config.shard, name, str(lost))
        finally:
            connection.close()

    def _may_end(self) -> bool:
        with self.changed:
            if self.sessions:
                return False
            if os.getppid() != self.config.parent:  # the supervisor is gone
                return True
            if len(self.seen_workers) < self.config.workers:
                return False  # some workers have yet to join
            alone_s = time.monotonic() - self.alone_since  # a worker could have reconnected meanwhile
            return self.finished or (alone_s > self.config.timeout_s and not self.config.dedicated)

    def _copy_state(self, copy: ShardState) -> None:
        """Copy the state that outlives a crash, for a snapshot."""
        with self.changed:
            self.server.copy_into(copy, self.config.state_parts)


def _layout(weights: Tensors) -> list[tuple[Any, Any]]:
    return [(weight.shape, weight.dtype) for weight in weights]
