"""ShardServer: the process that holds one shard of the parameter server.

A thread serves each connection, and one lock guards the state. The shard accepts workers whenever they
connect, removes workers that die, leave or fall silent, and writes a snapshot at regular intervals. After a
crash its supervisor starts it again; it continues from the snapshot, and workers reconnect by themselves. The
shard ends when all workers have left, or when no worker could reconnect any more.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from pathlib import Path
from threading import Condition, Thread

from offbeat.core.settings import build
from offbeat.errors import OffbeatError, RankLost
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
from offbeat.strategies import find_strategy
from offbeat.worlds.processes.server.attendance import RETURN_S, Attendance
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.connection import HUNG_UP, Connection
from offbeat.worlds.processes.server.discovery import publish_weights, register
from offbeat.worlds.processes.server.looks import Looks
from offbeat.worlds.processes.server.newcomers import Newcomers, answer_question, receive_first
from offbeat.worlds.processes.server.second import NoSecond, Second, recover
from offbeat.worlds.processes.server.session import HungUp, WorkerSession
from offbeat.worlds.processes.server.shard_copy import ShardCopy
from offbeat.worlds.processes.server.snapshots import Snapshots
from offbeat.worlds.processes.server.tls import Certificate
from offbeat.worlds.processes.server.wire import (
    FROM_SHARDS,
    NEW,
    NOBODY,
    QUESTIONS,
    MessageType,
    ProtocolError,
    encode_header,
)
from offbeat.worlds.processes.store import DeadlineStore

CHECK_S = 1.0  # between checks that the workers which others wait for are still alive
LEAST_S = 0.001  # between looks whether the aggregation is due: its time stands while a worker looks
ACCEPT_S = 0.05  # between checks, while waiting for connections, whether the shard may end
BACKOFF_S = 0.5  # after a connection could not be accepted: the process may have too many open
log = logging.getLogger("offbeat.server")


class ShardServer:
    """The state machine of one shard, and the sessions of its workers."""

    def __init__(self, config: ShardConfig, store: DeadlineStore, token: bytes) -> None:
        self.config = config
        strategy = build(find_strategy(config.strategy), config.settings)
        half = strategy.server_half()
        if half is None:
            raise OffbeatError(f"{config.strategy} has no parameter server with these settings")
        self.half = half
        self.store = store
        self.token = token
        self.snapshots = Snapshots(Path(config.snapshot), config.snapshot_s)
        recovered = recover(config, store, token)
        saved = recovered or self.snapshots.read()
        if saved is not None and not config.fits(saved):
            raise OffbeatError(
                f"{config.snapshot} is of another model, or of other shards: move it away to start anew"
            )
        state = saved or ShardState(config.buffers())
        self.server = ParameterServer(state, half, config.make_apply())
        self.sessions: dict[int, WorkerSession] = {}
        self.remote_bytes = 0  # sent to workers on other hosts
        self.has_weights = saved is not None
        # Whether all workers know of the weights, even those that are not answered yet.
        self.published_weights = self.has_weights and config.second is None
        self.attendance = Attendance(config, state.applied)
        self.finished = False  # whether the last worker that left had sent LEAVE
        self.alone_since = time.monotonic()  # when the last worker left
        self.newcomers = Newcomers()
        self.looks = Looks()
        self._refuses_connections = False
        self.changed = Condition()  # its lock guards the state
        self.certificate: Certificate | None = None  # if connections are encrypted
        self.second = NoSecond()
        if config.second is not None:
            self.second = Second(config, store, token, self.server, self.changed)
        self.shard_copy = ShardCopy(config, self.server.aggregation.report_size)  # of another shard's
        if saved is not None:
            what = f"the copy at shard {config.second}" if recovered else "its snapshot"
            log.warning("shard %d: starts again from %s", config.shard, what)
            self.snapshots.start(self._copy_state)

    @property
    def opened(self) -> bool:
        """True if the shard has weights and all workers have joined, even if some have left again."""
        return self.published_weights and self.attendance.complete

    # --- what sessions call

    def join(self, session: WorkerSession, clock: int | None, pushes: int, rejoins: bool) -> bool:
        with self.changed:
            fenced = clock is not None and (rejoins or self._has_forgotten(session.worker))
            if fenced and self.server.aggregation.reduces:
                session.connection.send(encode_header(MessageType.JOIN_REFUSED))
                raise ConnectionAbortedError("the others have trained on without this worker")
            if session.worker in self.sessions:  # it reconnected before its old connection was found dead
                self.sessions[session.worker].connection.end()
            self.sessions[session.worker] = session
            self.attendance.note(session.worker, pushes)
            session.fenced = fenced
            self.looks.forgive(session)
            self.dispatch(Join(worker=session.worker, clock=clock, pushes=pushes, fenced=fenced))
            return self.has_weights

    def leave(self, session: WorkerSession, announced: bool) -> None:
        with self.changed:
            if self._is_open(session):  # the worker has no newer connection
                self._remove(session.worker, announced)

    def request(self, session: WorkerSession, message: ClientMessage) -> int:
        self._wait_for_workers(session)
        with self.changed:
            self._check_open(session)
            self._check(session, message)
            session.expect(message)
            self.looks.note_wait(session)
            self.dispatch(message)
            session.waits = not self.looks.admit(session)
        while session.waits:
            with self.changed:
                session.waits = not self.wait_for_reply(session)
                if session.hung_up and not session.answered:
                    raise HungUp("it no longer waits")
                session.heard_s = time.monotonic()  # the worker's silence counts from now on
                awaited = self._awaited(session)
            if session.waits:  # without the lock: a worker that reads nothing must not stop the others
                session.send_waiting(*awaited)
        with self.changed:
            self._check_open(session)
            position = self.second.position
            owed = self.looks.tell(session)
        if owed[0]:
            session.send_looked(*owed)
        if isinstance(message, Push):
            self.second.wait(position)
        return session.remote_bytes

    def load_weights(self, tensors: Tensors, part: int = 0, initial: bool = False) -> None:
        with self.changed:
            if initial and self.has_weights:  # another worker was quicker
                return
            self.server.handle(Load(worker=-1, part=part, tensors=tensors))
            first = not part and not self.has_weights
            self.has_weights = self.has_weights or first
        if first:
            self._publish_weights()
            Thread(target=self.snapshots.start, args=(self._copy_state,), daemon=True).start()
        else:
            self.second.restart()
            if not part:  # the last snapshot has the old weights and clocks
                self.snapshots.write_anew(self._copy_state)

    def _publish_weights(self) -> None:
        """Publish that there are weights, before any worker is answered: if they are lost, all are told.

        If another shard keeps a copy, it has it by then.
        """
        self.second.start()
        try:
            publish_weights(self.store, self.token, self.config.shard)
        except RankLost as unreachable:
            log.warning("shard %d: cannot publish that it has weights: %s", self.config.shard, unreachable)
        with self.changed:
            self.published_weights = True
            self.changed.notify_all()

    # --- called with the lock held

    def dispatch(self, message: Message) -> None:
        """Hand a message to the state machine, and its answers to the sessions of their workers."""
        answers = [answer for answer in self.server.handle(message) if answer.worker in self.sessions]
        for answer in answers:
            nbytes = (session := self.sessions[answer.worker]).answer(answer)
            self.looks.note_answer(session)
            self.remote_bytes += 0 if answer.worker in self.config.local_workers else nbytes
        for answer in answers:  # whose thread may come much later, when others have been answered again
            self.sessions[answer.worker].remote_bytes = self.remote_bytes
        self.changed.notify_all()

    def wait_for_reply(self, session: WorkerSession) -> bool:
        """Wait a while until the worker has its answer, or the session is closed; return whether it is so.

        Meanwhile the waiting thread wakes the aggregation when it is due, and removes silent workers.
        """
        checked_s = time.monotonic()
        while not self.looks.admit(session):
            now_s, patience_s = self.looks.training_s(time.monotonic()), CHECK_S
            wake_at = self.server.aggregation.wake_at(self.server.state)
            if wake_at is not None and wake_at <= now_s:
                self.dispatch(Tick(at_s=now_s))
            elif wake_at is not None:
                patience_s = min(CHECK_S, max(LEAST_S, wake_at - now_s))
            if self.changed.wait_for(lambda: self._is_served(session), patience_s):
                return True
            self.remove_silent(session.worker)
            if time.monotonic() - checked_s >= CHECK_S:
                return self.looks.admit(session)
        return True

    def remove_silent(self, waiting: int) -> None:
        """Remove the workers that have sent nothing for too long, while worker `waiting` waits."""
        too_long = time.monotonic() - self.config.silence_s
        for worker, session in list(self.sessions.items()):
            excused = worker == waiting or session.waits or self.looks.of(worker)
            if not excused and session.heard_s < too_long:
                log.warning("shard %d: worker %d is silent, removed", self.config.shard, worker)
                self._remove(worker, announced=False)
                self.attendance.lose(worker, silent=True)

    def _wait_for_workers(self, session: WorkerSession) -> None:
        """Wait, without the lock, until all workers have joined."""
        deadline = time.monotonic() + self.config.timeout_s
        while True:
            with self.changed:
                if self.changed.wait_for(lambda: self.opened or not self._is_open(session), CHECK_S):
                    return self._check_open(session)
                joined, expected = self.attendance.joined, self.config.workers
            if time.monotonic() > deadline:
                log.warning("shard %d: %d of %d workers have joined", self.config.shard, joined, expected)
                raise ConnectionAbortedError("not all workers have joined")
            session.send_waiting(NOBODY, 0.0, joined)

    def _awaited(self, waiting: WorkerSession) -> tuple[int, float, int]:
        """Return the worker that the others wait for, the seconds of its silence, and the joined workers."""
        silent = [
            session for session in self.sessions.values() if session is not waiting and not session.waits
        ]
        first = min(silent, key=lambda session: session.heard_s, default=None)
        joined = self.attendance.joined
        return (
            (NOBODY, 0.0, joined)
            if first is None
            else (first.worker, max(0.0, time.monotonic() - first.heard_s), joined)
        )

    def _has_forgotten(self, worker: int) -> bool:
        """Return whether a worker was away for so long that others have trained on without it."""
        return worker not in self.sessions and self.attendance.has_forgotten(worker)

    def _check(self, session: WorkerSession, message: ClientMessage) -> None:
        """Raise ProtocolError for a message out of order."""
        match message:
            case Push():
                # A new worker's first clock is the highest that any shard gave it; later clocks have no gaps.
                latest = self.server.shard.applied[message.worker]
                if session.pushed and message.clock > latest + 1:
                    raise ProtocolError(f"push {message.clock} before push {message.clock - 1}")
                session.pushed = session.pushed or not session.fenced or message.clock > latest
            case Reduce():
                if not self.server.aggregation.expects(message.worker, message.number):
                    raise ProtocolError(
                        f"a tensor for reduction {message.number}, which ended without this worker"
                    )

    def _is_served(self, session: WorkerSession) -> bool:
        return self.looks.admit(session) or session.hung_up or not self._is_open(session)

    def _is_open(self, session: WorkerSession) -> bool:
        return self.sessions.get(session.worker) is session

    def _check_open(self, session: WorkerSession) -> None:
        if not self._is_open(session):
            raise ConnectionAbortedError("the worker was removed as silent, or has reconnected")

    def _remove(self, worker: int, announced: bool) -> None:
        self.sessions.pop(worker).connection.end()
        if not announced:
            self.attendance.lose(worker, silent=False)
        self.finished = announced
        self.alone_since = time.monotonic()
        self.dispatch(Leave(worker=worker, at_s=self.looks.training_s(self.alone_since)))

    # --- connections

    def run(self) -> None:
        """Accept connections until no worker is left to serve."""
        config = self.config
        where = (config.shard, config.host, config.tcp_port, config.insecure)
        listener, encrypted = register(self.store, self.token, *where)
        self.certificate = Certificate() if encrypted else None
        if self.has_weights:
            Thread(target=self._publish_weights, daemon=True).start()
        with listener:
            listener.setblocking(False)
            while not self._may_end():
                self.newcomers.end_late()
                if self._poll(listener):
                    self._accept(listener)
        self.second.end()
        written = True
        if config.dedicated and self.has_weights:
            written = self.snapshots.write_last(self._copy_state, config.timeout_s)
        self.snapshots.end(keep=config.dedicated)
        if not written:
            raise OffbeatError(
                f"the final weights could not be written to {config.snapshot} for {config.timeout_s:.0f} s, "
                "and are lost; an older snapshot may be there"
            )

    def _poll(self, listener: socket.socket) -> bool:
        """Wait a moment for a connection; meanwhile notice waiting workers that have hung up."""
        with self.changed:
            waiting = {s.connection.fileno(): s for s in self.sessions.values() if s.waits}
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        for descriptor in waiting:
            poll.register(descriptor, HUNG_UP)
        events = dict(poll.poll(1000 * ACCEPT_S))
        with self.changed:
            for descriptor in events.keys() & waiting.keys():
                waiting[descriptor].hung_up = waiting[descriptor].waits
                self.changed.notify_all()
        return listener.fileno() in events

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection; if the process has too many open, try again later."""
        try:
            accepted, _ = listener.accept()
            accepted.setblocking(True)
            Thread(target=self.admit, args=(accepted,), daemon=True).start()
        except BlockingIOError:  # it is gone again
            return
        except (OSError, RuntimeError) as failed:  # RuntimeError: no more threads
            if not self._refuses_connections:
                log.error("shard %d: cannot accept connections: %s", self.config.shard, failed)
            self._refuses_connections = True
            time.sleep(BACKOFF_S)
            return
        if self._refuses_connections:
            log.warning("shard %d: accepts connections again", self.config.shard)
        self._refuses_connections = False

    def admit(self, accepted: socket.socket) -> None:
        """Serve a connection until it ends. Runs in a thread of its own."""
        connection, name = Connection(accepted, self.config.silence_s), "a new connection"
        self.newcomers.add(connection)
        try:
            first = receive_first(connection, self.certificate, self.token)
            if first is None:
                log.warning("shard %d: refused a connection with another token", self.config.shard)
                return None
            self.newcomers.remove(connection)
            kind, worker, clock, pushes = first
            if kind in FROM_SHARDS:
                name = "another shard"
                return self.shard_copy.serve(kind, worker, clock, connection)
            if kind in QUESTIONS:
                return answer_question(self, connection, *first)
            name = f"worker {worker}"
            session = WorkerSession(self, self.config, self.half, self.server.aggregation, worker, connection)
            session.serve(None if clock == NEW else clock, pushes, kind is MessageType.REJOIN)
        except ProtocolError as malformed:
            log.warning("shard %d: refused %s: it sent %s", self.config.shard, name, str(malformed))
        except OSError as lost:
            log.info("shard %d: connection to %s lost: %s", self.config.shard, name, str(lost))
        finally:
            self.newcomers.remove(connection)
            connection.close()

    def _may_end(self) -> bool:
        with self.changed:
            if self.sessions:
                return False
            if os.getppid() != self.config.parent:  # the supervisor is gone
                return True
            if not self.attendance.complete:
                return False
            alone_s = time.monotonic() - self.alone_since  # a worker could have reconnected meanwhile
            if self.finished and alone_s < RETURN_S and self.attendance.may_return():
                return False
            return self.finished or (alone_s > self.config.timeout_s and not self.config.dedicated)

    def _copy_state(self, copy: ShardState) -> None:
        """Copy the state that outlives a crash, for a snapshot."""
        with self.changed:
            self.server.copy_into(copy, self.config.state_parts)
