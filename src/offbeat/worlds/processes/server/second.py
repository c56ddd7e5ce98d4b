"""Second: keeps a copy of a shard's state at another shard, so that no acknowledged update dies with it.

    shard     push → apply, journal the effect → … the second has it → acknowledge the push
    second    state, once; then every effect, in order, each acknowledged

The store says whether the copy is complete (`copy/SHARD` is its identity), and a shard that was started
again asks its second only for that one. While the second is away the shard serves on: it first takes its word
back in the store, then acknowledges without a copy, and sends its state anew when the second has returned.

[ours] A log since the last snapshot would grow with every push; a copy that follows needs the memory of one
shard, whatever the time between snapshots.
"""

from __future__ import annotations

import logging
import secrets
import time
from queue import Empty, SimpleQueue
from threading import Condition, Event, Thread

from offbeat.errors import OffbeatError, RankLost
from offbeat.server.journal import Effect
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.copy_wire import receive_state, send_effect, send_state
from offbeat.worlds.processes.server.dial import authenticate, dial
from offbeat.worlds.processes.server.discovery import resolve
from offbeat.worlds.processes.server.shard_copy import NONE
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.server.wire import (
    FROM_SECOND,
    MOST,
    MessageType,
    ProtocolError,
    encode_header,
    read_header,
)
from offbeat.worlds.processes.store import DeadlineStore

RETRY_S = 0.2  # between attempts to reach the second, and looks whether it is still there
START_S = 30.0  # for the second to start, before the shard serves without a copy
ANSWER_S = 10.0  # for the second to acknowledge an effect, at most; less if workers wait for less
BATCH = 64  # effects that are sent before their acknowledgements are read
log = logging.getLogger("offbeat.server")


class NoSecond:
    """Instead of a `Second`: no other shard keeps a copy."""

    position = 0

    def start(self) -> None:
        pass

    def restart(self) -> None:
        pass

    def wait(self, position: int) -> None:
        pass

    def end(self) -> None:
        pass


class Second(NoSecond):
    """A shard's link to the shard that keeps its copy, from a thread of its own."""

    def __init__(
        self,
        config: ShardConfig,
        store: DeadlineStore,
        token: bytes,
        server: ParameterServer,
        lock: Condition,
    ) -> None:
        self.position = 0  # number of the latest effect
        self._config = config
        self._store = DeadlineStore.of(store, config.timeout_s)
        self._token = token
        self._server = server
        self._lock = lock  # guards the server
        self._copy = ShardState([])  # memory that is allocated once
        self._effects: SimpleQueue[tuple[int, Effect] | None] = SimpleQueue()  # None: look at `_replaced`
        self._changed = Condition()
        self._follows = False  # whether effects are recorded for the copy
        self._complete = False  # whether pushes wait until the copy has them
        self._replaced = False  # whether the state must be sent anew
        self._kept = 0  # number of the latest effect that the second has
        self._warned = False
        self._ended = Event()
        if not server.aggregation.can_be_followed:
            raise OffbeatError(f"{config.strategy} with these settings cannot keep copies of its shards")
        server.aggregation.journal = self._record

    def start(self) -> None:
        """Begin to keep a copy; wait a while until it is complete."""
        Thread(target=self._run, name=f"second of shard {self._config.shard}", daemon=True).start()
        self._await_complete()

    def restart(self) -> None:
        """Send the state anew, because it has been replaced; wait a while until the copy is complete."""
        with self._changed:
            self._replaced = True
        self._effects.put(None)
        self._await_complete()

    def wait(self, position: int) -> None:
        """Wait until the second has all effects up to this one, or the shard serves without a copy."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept >= position or not self._complete)

    def end(self) -> None:
        """Keep no copy any longer: the shard ends."""
        self._ended.set()

    def _await_complete(self) -> None:
        def complete() -> bool:
            return self._complete and not self._replaced

        with self._changed:
            if not self._changed.wait_for(complete, min(START_S, self._config.timeout_s / 2)):
                self._warn("it cannot be reached")

    def _record(self, effect: Effect) -> None:
        """Add an effect, with the shard's lock held."""
        if self._follows:
            self.position += 1
            self._effects.put((self.position, effect))

    # --- the thread

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                connection = connect_second(self._config, self._store, self._token, self._patience_s)
                try:
                    self._send_copy(connection)
                    self._send_effects(connection)
                finally:
                    connection.close()
            except (OSError, ProtocolError, OffbeatError) as failed:
                self._serve_without_copy(failed)
            self._ended.wait(RETRY_S)

    @property
    def _patience_s(self) -> float:
        return min(ANSWER_S, self._config.timeout_s / 4)

    def _send_copy(self, connection: Connection) -> None:
        """Send the whole state, and what has changed meanwhile; only then does the store name this copy."""
        identity = 1 + secrets.randbelow(MOST - 1)
        with self._lock:
            while not self._effects.empty():
                self._effects.get()
            self._replaced = False
            self._server.copy_into(self._copy, self._config.state_parts)
            unapplied = self._server.unapplied()
            self._follows = True
        send_state(connection, identity, self._copy)
        _receive_ack(connection, 0)
        self._send(connection, [(0, effect) for effect in unapplied])
        with self._changed:
            self._complete = True  # pushes wait from now on; those before are in the queue
        kept = self._send(connection, self._drain())
        SignedStore(self._store, self._token).set(_key(self._config.shard), str(identity))
        self._keep(kept)
        if self._warned:
            log.warning("shard %d: shard %d keeps a copy of it again", *self._names)
        self._warned = False

    def _send_effects(self, connection: Connection) -> None:
        while not self._ended.is_set():
            try:
                first = self._effects.get(timeout=RETRY_S)
            except Empty:
                if connection.is_hung_up:
                    raise ConnectionResetError("it has ended") from None
                continue
            if self._replaced:
                return
            batch = [first] if first is not None else []
            self._keep(self._send(connection, [*batch, *self._drain(BATCH)]))

    def _drain(self, most: int | None = None) -> list[tuple[int, Effect]]:
        found: list[tuple[int, Effect]] = []
        while not self._effects.empty() and (most is None or len(found) < most):
            effect = self._effects.get()
            if effect is not None:
                found.append(effect)
        return found

    def _send(self, connection: Connection, effects: list[tuple[int, Effect]]) -> int:
        """Send effects; return the number of the last one, once the second has acknowledged all."""
        for number, effect in effects:
            send_effect(connection, number, effect)
        for number, _ in effects:
            _receive_ack(connection, number)
        return effects[-1][0] if effects else 0

    def _keep(self, number: int) -> None:
        with self._changed:
            self._kept = max(self._kept, number)
            self._changed.notify_all()

    def _serve_without_copy(self, failed: Exception) -> None:
        """Take the word in the store back, and let pushes be acknowledged without a copy."""
        try:
            SignedStore(self._store, self._token).set(_key(self._config.shard), str(NONE))
        except RankLost as unreachable:
            log.error("shard %d: cannot publish that it has no copy: %s", self._config.shard, unreachable)
        with self._changed:
            had, self._follows, self._complete = self._complete, False, False
            self._changed.notify_all()
        if had and self._server.rule.members(self._server.state):  # else the training has ended
            self._warn(str(failed))

    def _warn(self, why: str) -> None:
        if not self._warned and not self._ended.is_set():
            self._warned = True
            log.error(
                "shard %d: shard %d keeps no copy of it (%s): until it does, a crash loses the updates since "
                "the last snapshot",
                *(*self._names, why),
            )

    @property
    def _names(self) -> tuple[int, int | None]:
        return self._config.shard, self._config.second


def _receive_ack(connection: Connection, number: int) -> None:
    _, acknowledged, _, _ = read_header(connection, FROM_SECOND)
    if acknowledged != number:
        raise ProtocolError("another acknowledgement than that of what was sent")


def _key(shard: int) -> str:
    return f"copy/{shard}"


def connect_second(config: ShardConfig, store: DeadlineStore, token: bytes, patience_s: float) -> Connection:
    """Connect to the shard that keeps this one's copy."""
    assert config.second is not None
    name = f"shard {config.second}"
    address = resolve(store, token, config.second, config.host)
    if address is None:
        raise ConnectionError(f"{name} has not started")
    connection = dial(address, name, patience_s, config.silence_s, config.insecure)
    try:
        authenticate(connection, name, token)
    except BaseException:
        connection.close()
        raise
    return connection


def recover(config: ShardConfig, store: DeadlineStore, token: bytes) -> ShardState | None:
    """Return the state that the second has kept, for a shard that was started again; None: there is none."""
    if config.second is None:
        return None
    store = DeadlineStore.of(store, config.timeout_s)
    identity = int(SignedStore(store, token).find(_key(config.shard)) or NONE)
    deadline, failed = time.monotonic() + min(START_S, config.timeout_s / 2), "it has no copy any more"
    while identity != NONE and time.monotonic() < deadline:
        try:
            connection = connect_second(config, store, token, ANSWER_S)
            try:
                return _ask(connection, identity, config)
            finally:
                connection.close()
        except LookupError:
            break
        except (OSError, OffbeatError, ProtocolError) as error:
            failed = str(error)
            time.sleep(RETRY_S)
    if identity != NONE:
        log.error(
            "shard %d: shard %d does not give its copy back (%s): starting from the last snapshot",
            *(config.shard, config.second, failed),
        )
    return None


def _ask(connection: Connection, identity: int, config: ShardConfig) -> ShardState:
    connection.send(encode_header(MessageType.RECOVER, identity))
    _, found, count, _ = read_header(connection, FROM_SECOND)
    if found != identity:
        raise LookupError("it has no copy any more")
    return receive_state(connection, count, config)
