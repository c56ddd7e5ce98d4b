"""ShardChannel: one worker's channel to one shard of the server, and the requests in progress on it.

When the connection fails (because of the shard or the network), the channel reconnects and sends the requests
in progress again. A shard that already has a push recognizes it by its clock, so no push is applied twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread

import torch
from torch import Tensor

from offbeat.errors import OffbeatError, RankLost
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.dial import authenticate, dial
from offbeat.worlds.processes.server.discovery import ShardAddress, failure, has_had_weights, resolve
from offbeat.worlds.processes.server.turns import Turns
from offbeat.worlds.processes.server.wire import HEADER, NEW, NOBODY, MessageType, encode_header
from offbeat.worlds.processes.store import DeadlineStore, wait_for

POLL_S = 0.02  # at the most, between looks for a shard's address
START_S = 30.0  # for a shard's process to start, however short the timeout: it imports torch
MAX_BACKOFF_S = 0.5  # between attempts to connect; the delay grows from 0, and is 0 again after an answer
JOIN_TIMEOUT_S = 10.0  # for a shard to admit a worker, before the worker tries again
LEAVE_TIMEOUT_S = 5.0  # for the last request to be sent
log = logging.getLogger("offbeat")


@dataclass(frozen=True)
class ClientIdentity:
    """A worker's number, and the store and token with which it finds shards and is admitted."""

    store: DeadlineStore
    host: str  # of the store, by a name that this worker can resolve
    worker: int
    token: bytes
    timeout_s: float
    insecure: bool = False  # whether connections to other hosts may be without encryption


@dataclass(eq=False)
class Request:
    """A message to a shard, and memory for its answer."""

    message: list[Tensor]
    answer: list[Tensor]
    await_ready: Callable[[], None] = lambda: None  # blocks until the message can be read: it may be on a GPU
    done: bool = False
    began_s: float = 0.0  # when the message was last sent
    ended_s: float = 0.0  # when the answer had arrived
    waits_for: tuple[int, int, int] | None = None  # what the shard last said of it: the numbers of WAITING
    looked_s: tuple[float, float] = (0.0, 0.0)  # the seconds of LOOKED

    @property
    def has_tensors(self) -> bool:
        """True if more than a header is sent."""
        return len(self.message) > 1

    @property
    def header(self) -> list[int]:
        """The numbers of the answer's header."""
        numbers: list[int] = self.answer[0].tolist()
        return numbers


class Pipeline:
    """A connection in use: one thread sends requests, another receives their answers, both in order.

    So a worker computes while its update travels, and neither end waits until the other has read.
    """

    def __init__(self, connection: Connection, turns: Turns | None = None) -> None:
        self._connection = connection
        self._turns = turns  # if the host has other shards, too
        self._broken: OSError | None = None
        self._changed = Condition()
        self._outgoing: SimpleQueue[Request | None] = SimpleQueue()
        self._incoming: SimpleQueue[Request | None] = SimpleQueue()
        self._sender = Thread(target=self._work, args=(self._outgoing, self._send), daemon=True)
        self._receiver = Thread(target=self._work, args=(self._incoming, self._receive), daemon=True)
        self._sender.start()
        self._receiver.start()

    def submit(self, request: Request) -> None:
        """Send a request, after those submitted before."""
        request.done = False
        if self._turns is not None and request.has_tensors:
            with self._changed:
                if self._broken is None:  # else nobody would send it
                    self._turns.line_up(self, request)
        self._outgoing.put(request)
        self._incoming.put(request)

    def wait(self, request: Request, patience_s: float) -> None:
        """Wait for a request's answer; raise the connection's error, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: request.done or self._broken, max(0.0, patience_s)):
                raise TimeoutError("no answer")
            if not request.done:
                assert self._broken is not None
                raise self._broken

    @property
    def is_broken(self) -> bool:
        """True if the connection has failed, also while no request is in progress."""
        return self._broken is not None or self._connection.is_hung_up

    def close(self, last: Request | None = None) -> None:
        """End both threads and the connection, after sending a last request, which has no answer."""
        if last is not None:
            self._outgoing.put(last)
            self._outgoing.put(None)
            self._incoming.put(None)
            self._sender.join(LEAVE_TIMEOUT_S)
            self._connection.end_sending()  # a close with unread answers would discard the last request
            self._receiver.join(LEAVE_TIMEOUT_S)
        self._outgoing.put(None)
        self._incoming.put(None)
        self._connection.end()
        self._give_up_turns()
        self._sender.join()
        self._receiver.join()
        self._connection.close()

    def _work(self, requests: SimpleQueue[Request | None], process: Callable[[Request], None]) -> None:
        try:
            while (request := requests.get()) is not None:
                process(request)
        except OSError as broken:
            with self._changed:
                self._broken = self._broken or broken
                self._changed.notify_all()
            self._connection.end()  # so that the other thread stops waiting, too
            self._give_up_turns()

    def _give_up_turns(self) -> None:
        if self._turns is not None:
            self._turns.give_up(self)

    def _send(self, request: Request) -> None:
        request.await_ready()
        if self._turns is None or not request.has_tensors:
            request.began_s = time.monotonic()
            self._connection.send(*request.message)
            return
        with self._turns.turn(self, request):
            request.began_s = time.monotonic()
            self._connection.send(*request.message)
            if self._turns.has_more:
                self._connection.flush()

    def _receive(self, request: Request) -> None:
        header = request.answer[:1]
        self._connection.receive(*header)
        while header and header[0][0] in (MessageType.WAITING, MessageType.LOOKED):
            kind, *numbers, _ = header[0].tolist()
            if kind == MessageType.WAITING:
                request.waits_for = tuple(numbers)
            else:
                request.looked_s = (numbers[0] / 1e9, numbers[1] / 1e9)
            self._connection.receive(*header)
        self._connection.receive(*request.answer[1:])
        request.ended_s = time.monotonic()
        with self._changed:
            request.done = True
            self._changed.notify_all()


class ShardChannel:
    """A channel that sends requests to one shard, and reconnects if necessary."""

    def __init__(self, identity: ClientIdentity, shard: int, name: str, turns: Turns | None = None) -> None:
        self.name = name  # in words, for messages
        self.clock = NEW  # of the last push that the shard acknowledged
        self.pushes = 0  # number of acknowledged pushes
        self.has_weights = False  # whether the shard has weights
        self.is_on_host = False  # whether the shard is on this host
        self.fenced = False  # whether the shard has let this worker rejoin at a later clock
        self._identity = identity
        self._store = DeadlineStore.of(identity.store, identity.timeout_s)
        self._shard = shard
        self._turns = turns  # of all channels to the shard's host, if there are several
        self._in_progress: list[Request] = []
        self._pipeline: Pipeline | None = None
        self._join_type = MessageType.JOIN
        self._backoff_s = 0.0
        self._starts_by = time.monotonic() + START_S
        self._open(time.monotonic() + identity.timeout_s)

    def start(self, request: Request) -> Request:
        """Start to send a request."""
        self._in_progress.append(request)
        if self._pipeline is not None:  # else `finish` reconnects
            self._pipeline.submit(request)
        return request

    def finish(self, request: Request, deadline: float) -> RankLost | None:
        """Wait for the answer, and reconnect if necessary; return the error if no answer arrives."""
        while True:
            try:
                if self._pipeline is None:
                    raise ConnectionError("there is no connection")
                self._pipeline.wait(request, deadline - time.monotonic())
                self._in_progress.remove(request)
                self._backoff_s = 0.0
                self.has_weights = True  # a shard without weights does not answer
                return None
            except OSError as failed:
                if time.monotonic() > deadline:
                    return self._explain(request)
                log.warning("connection to %s lost, reconnecting", self.name)
                log.debug("cause of the lost connection: %s", failed)
            lost = self._reconnect(deadline)
            if lost is not None:
                return lost

    def read(self, into: list[Tensor], deadline: float) -> RankLost | None:
        """Read the shard's weights, past the requests in progress; return the error if they do not arrive."""
        return self._ask(lambda: encode_header(MessageType.READ), into, deadline)[1]

    def look(self, began_s: float, deadline: float) -> Connection:
        """Hold the shard's other workers for as long as the returned connection lasts."""

        def word() -> Tensor:
            ago_s = time.monotonic() - began_s
            return encode_header(MessageType.LOOK, self._identity.worker, int(1e9 * ago_s))

        kept: list[Connection] = []
        if lost := self._ask(word, [], deadline, kept)[1]:
            raise lost
        return kept[0]

    def confirm(self, deadline: float) -> RankLost | None:
        """Warn if the shard no longer holds what it has acknowledged; return the error if it cannot say so.

        It does while the connection lasts over which it did. Else it may have been started again.
        """
        if self._pipeline is not None:
            return self._reconnect(deadline) if self._pipeline.is_broken else None
        question = encode_header(MessageType.COUNT, self._identity.worker, self.clock, self.pushes)
        answer, failed = self._ask(lambda: question, [], deadline)
        self._tell_lost(answer[2])
        return failed

    def _ask(
        self,
        question: Callable[[], Tensor],
        into: list[Tensor],
        deadline: float,
        kept: list[Connection] | None = None,
    ) -> tuple[list[int], RankLost | None]:
        """Ask by a connection of its own, until the deadline, and close or keep it; return the header."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        while True:
            connection = None
            try:
                connection = self._connect(deadline)
                authenticate(connection, self.name, self._identity.token)
                connection.limit(max(POLL_S, deadline - time.monotonic()))
                connection.send(question())
                connection.receive(header, *into)
                if kept is not None:
                    kept.append(connection)
                    connection = None
                return header.tolist(), None
            except RankLost as lost:
                return header.tolist(), lost
            except OSError as failed:
                if time.monotonic() > deadline:
                    return header.tolist(), RankLost(f"{self.name} cannot be asked: {failed}")
                time.sleep(POLL_S)
            finally:
                if connection is not None:
                    connection.close()

    def rejoin(self, deadline: float) -> RankLost | None:
        """Rejoin as a newcomer, because another shard has trained on without this worker."""
        self._join_type = MessageType.REJOIN
        return self._reconnect(deadline)

    def _tell_lost(self, lost: int) -> None:
        if lost:
            text = "%s was started again from its last snapshot, and has lost %d of this worker's updates. "
            log.warning(text + "Copies of shards prevent that", self.name, lost)

    def leave(self) -> None:
        """Send LEAVE to the shard, if it is connected."""
        if self._pipeline is not None:
            self._pipeline.close(Request([encode_header(MessageType.LEAVE)], []))
            self._pipeline = None

    def _explain(self, request: Request) -> RankLost:
        """Return the error for a request without an answer; it names the worker that the shard waits for."""
        timeout_s, waits_for = self._identity.timeout_s, request.waits_for
        if waits_for is None:
            return RankLost(f"{self.name} did not answer for {timeout_s:.0f} s")
        worker, silent_ms, joined = waits_for
        if worker == NOBODY:
            return RankLost(f"only {joined} workers have joined {self.name} within {timeout_s:.0f} s")
        return RankLost(
            f"worker {worker} has not pushed for {silent_ms / 1000:.0f} s, and {self.name} waits for it; "
            f"this worker has waited for {timeout_s:.0f} s"
        )

    def _reconnect(self, deadline: float) -> RankLost | None:
        """Connect again, and resend the requests in progress; return the error if that fails."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        try:
            self._open(deadline)
        except RankLost as lost:
            return lost
        assert self._pipeline is not None
        for request in self._in_progress:
            self._pipeline.submit(request)
        return None

    def _open(self, deadline: float) -> None:
        """Connect, authenticate and join; try again until the deadline."""
        while True:
            time.sleep(min(self._backoff_s, max(0.0, deadline - time.monotonic())))
            self._backoff_s = min(MAX_BACKOFF_S, 2 * self._backoff_s + POLL_S)
            connection = None
            try:
                had_weights = self._had_weights(deadline)  # asked first: they may come while this one joins
                connection = self._connect(deadline)
                self._join(connection)
                if had_weights and not self.has_weights:
                    raise RankLost(f"{self.name} crashed before it had a snapshot: its weights are lost")
                self._pipeline = Pipeline(connection, self._turns)
                return
            except (OSError, OffbeatError) as failed:
                if connection is not None:
                    connection.close()
                if isinstance(failed, OffbeatError):
                    raise
                if time.monotonic() > deadline:
                    raise RankLost(f"{self.name} cannot be reached: {failed}") from failed

    def _had_weights(self, deadline: float) -> bool:
        """Return whether the shard has had weights, unless this worker is about to bring them."""
        if self.has_weights:
            return True
        if any(request.message[0][0] == MessageType.LOAD for request in self._in_progress):
            return False  # it is not acknowledged, so it is sent again
        try:
            return has_had_weights(self._store_until(deadline), self._identity.token, self._shard)
        except RankLost as unreachable:
            raise ConnectionError(str(unreachable)) from unreachable

    def _store_until(self, deadline: float) -> DeadlineStore:
        return self._store.within(min(JOIN_TIMEOUT_S, max(POLL_S, deadline - time.monotonic())))

    def _connect(self, deadline: float) -> Connection:
        identity, began = self._identity, time.monotonic()
        store = self._store_until(deadline)
        patience_s = max(deadline, self._starts_by) - began
        address = wait_for(lambda: self._resolve(store), patience_s, POLL_S)
        if address is None:
            raise TimeoutError("its process has not started")
        deadline += time.monotonic() - began  # the shard's time to start does not count
        patience_s = min(JOIN_TIMEOUT_S, max(POLL_S, deadline - time.monotonic()))
        connection = dial(address, self.name, patience_s, identity.timeout_s / 2, identity.insecure)
        self.is_on_host = connection.stays_on_host
        return connection

    def _resolve(self, store: DeadlineStore) -> ShardAddress | None:
        try:
            failed = failure(store, self._identity.token, self._shard)
            address = resolve(store, self._identity.token, self._shard, self._identity.host)
        except RankLost as unreachable:  # so that the caller tries again until its own deadline
            raise ConnectionError(str(unreachable)) from unreachable
        if failed is not None:
            raise RankLost(f"{self.name} has ended: {failed}; it has said why in the log")
        return address

    def _join(self, connection: Connection) -> None:
        authenticate(connection, self.name, self._identity.token)
        ack = torch.zeros(HEADER, dtype=torch.int64)
        connection.send(encode_header(self._join_type, self._identity.worker, self.clock, self.pushes))
        connection.receive(ack)
        kind, clock, lost, has_weights, _ = ack.tolist()
        if kind == MessageType.JOIN_REFUSED:
            raise RankLost(
                "this worker was silent for too long: the others have trained on without it, and "
                f"{self.name} has no weights for it to return with"
            )
        self._tell_lost(lost)
        self.fenced = self.fenced or NEW != self.clock < clock
        self._join_type = MessageType.JOIN
        self.clock = clock
        self.has_weights = bool(has_weights)
        connection.limit(None)
