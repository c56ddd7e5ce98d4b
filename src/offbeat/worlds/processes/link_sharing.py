"""Unfairness of TCP's connections that share a link: `unfairness` and `unfair_s` of a cluster file.

All ranks send equal messages to several others at once, as they do when they push to shards:

    b(c)   bytes that came by connection c from when all had begun until the first was complete
    σ      deviation of ln b(c) among the connections into one rank, over all ranks and repeats

In virtual time a message has a speed of its own for as long as it takes. So what counts is how far apart
whole messages are, not how TCP's windows move meanwhile. Short ones are farther apart: who is served first is
ahead by as much of a short message as of a long one. So two sizes are measured, A and A/4 seconds long:

    σ(A)² = unfairness² + (unfair_s / A)²        σ(A/4)² = unfairness² + (4 unfair_s / A)²
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import torch

from offbeat.errors import LaunchError, OffbeatError, RankLost
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.server.auth import sign
from offbeat.worlds.processes.server.bootstrap import shared_store, shared_token
from offbeat.worlds.processes.server.discovery import register, resolve
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.store import wait_for

LEAST_BYTES, MOST_BYTES = 1 << 18, 1 << 20  # of a long message
SHORTER = 4  # times
SHORTEST_S = 0.002  # of a long message alone
MOST_PEERS = 7  # to which a rank sends at once
WARM_UP, REPEATS = 2, 8  # the first messages of a connection are slow
CONNECT_S, SHORT_S = 30.0, 0.1  # for all connections; for one, where there is no time left
AT_ONCE = 1 << 16  # bytes of a read or a write
PACKET = 1448  # bytes: less than that is as good as nothing
PREFIX = "link-sharing"

MOST_UNFAIR = 1.0  # more is chance: one of the connections had nothing

Connections = list[tuple[int, socket.socket]]  # each with the rank at the other end


@dataclass(frozen=True)
class Spread:
    """Sum of squared deviations, and their degrees of freedom."""

    squares: float = 0.0
    freedom: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return how far apart the logarithms of some values are."""
        logs = list(map(math.log, values))
        mean = math.fsum(logs) / len(logs)
        return cls(math.fsum((each - mean) ** 2 for each in logs), len(logs) - 1)

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.squares + other.squares, self.freedom + other.freedom)

    @property
    def deviation(self) -> float | None:
        """The deviation; None where nothing was measured."""
        return math.sqrt(self.squares / self.freedom) if self.freedom else None


class Inflow:
    """Bytes that have come by each connection into this rank, of a message of `nbytes` by each."""

    def __init__(self, connections: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.came = [0] * connections
        self._at_begin: list[int] | None = None  # when the last one began
        self._at_end: list[int] | None = None  # when the first one was complete

    def add(self, connection: int, nbytes: int) -> None:
        """Count bytes that have come."""
        self.came[connection] += nbytes
        if self._at_begin is None and all(self.came):
            self._at_begin = list(self.came)
        if self._at_end is None and self.came[connection] >= self.nbytes:
            self._at_end = list(self.came)

    @property
    def is_complete(self) -> bool:
        return all(came >= self.nbytes for came in self.came)

    @property
    def spread(self) -> Spread:
        """The spread of the connections while all were in progress; nothing if they never were."""
        if self._at_begin is None or self._at_end is None:
            return Spread()
        shares = [end - begin for begin, end in zip(self._at_begin, self._at_end, strict=True)]
        return Spread.of([max(share, PACKET) for share in shares]) if max(shares) > 0 else Spread()


def message_bytes(model_bytes: int, world: int) -> int:
    """Return the bytes of a long message: what a worker pushes to one of the shards beside all workers."""
    return max(LEAST_BYTES, min(MOST_BYTES, model_bytes // world))


def measure_link_sharing(
    port: ProcessPort, device: torch.device, agree: Callable[[bool], bool], nbytes: int
) -> tuple[Spread, Spread]:
    """Send long messages of `nbytes` between all ranks, and short ones; return how evenly each came here.

    All ranks call this. `agree` waits for all of them, and returns whether all have passed True. If some
    cannot connect, all raise LaunchError. Of fewer than three ranks, none shares a link.
    """
    if port.world < 3:
        return Spread(), Spread()
    with ExitStack() as opened:
        failed: OffbeatError | None = None
        outgoing: Connections = []
        incoming: Connections = []
        try:
            outgoing, incoming = _connect(port, device, opened)
        except (LaunchError, RankLost) as error:
            failed = error  # once all know
        all_connected = agree(failed is None)
        if failed is not None:
            raise LaunchError(str(failed)) from failed
        if not all_connected:
            raise LaunchError("other ranks could not connect to each other")

        def measure(nbytes: int) -> Spread:
            spread = Spread()
            for repeat in range(WARM_UP + REPEATS):
                agree(True)
                found = _exchange(outgoing, incoming, nbytes, port.timeout_s).spread
                if repeat >= WARM_UP:
                    spread += found
            return spread

        return measure(nbytes), measure(nbytes // SHORTER)


def unfairness_of(long: Spread, short: Spread, long_s: float) -> tuple[float, float] | None:
    """Return `unfairness` and `unfair_s`, where a long message takes `long_s` alone; None: not measured.

    Where it takes less than `SHORTEST_S`, operating systems and not links decide which one is ahead.
    """
    if long.deviation is None or long_s < SHORTEST_S:
        return None
    deviation = min(long.deviation, MOST_UNFAIR)
    # A short message may be over before all have begun: then nothing is known of it.
    shorter = max(deviation, min(short.deviation or 0.0, MOST_UNFAIR))
    part = math.sqrt((shorter**2 - deviation**2) / (SHORTER**2 - 1))
    return math.sqrt(max(0.0, deviation**2 - part**2)), part * long_s


# --- connections


def _connect(port: ProcessPort, device: torch.device, opened: ExitStack) -> tuple[Connections, Connections]:
    """Connect to the next ranks, and accept the ranks before this one."""
    token = shared_token(port, device)
    store = port.failures.store.prefixed(f"{PREFIX}/{sign(token, 'name', '')[:16]}")
    _, (host, tcp_port) = shared_store(SignedStore(store, token), port.rank)
    listener, _ = register(store, token, port.rank, host, tcp_port, insecure=True)
    opened.enter_context(listener)
    patience_s = min(CONNECT_S, port.timeout_s / 2)  # who has failed waits for the others
    deadline = time.monotonic() + patience_s
    distances = range(1, min(MOST_PEERS, port.world - 1) + 1)
    outgoing: Connections = []
    for rank in ((port.rank + distance) % port.world for distance in distances):
        left_s = max(SHORT_S, deadline - time.monotonic())
        address = wait_for(partial(resolve, store, token, rank, host), left_s)
        if address is None:
            raise RankLost(f"rank {rank} has not said within {patience_s:.0f} s where it listens")
        try:
            connection = opened.enter_context(socket.create_connection(address.endpoint, left_s))
            connection.sendall(_greeting(token, port.rank, rank))
        except OSError as failed:
            raise LaunchError(f"rank {rank} cannot be reached at {address.host}: {failed}") from failed
        outgoing.append((rank, connection))
    before = [(port.rank - distance) % port.world for distance in distances]
    expected = {_greeting(token, rank, port.rank): rank for rank in before}
    return outgoing, _accept(listener, expected, deadline, opened)


def _greeting(token: bytes, sender: int, receiver: int) -> bytes:
    """Return what a rank says first, so that nobody else is taken for it."""
    return sign(token, f"{PREFIX}/{sender}/{receiver}", "").encode()


def _accept(
    listener: socket.socket, expected: dict[bytes, int], deadline: float, opened: ExitStack
) -> Connections:
    """Accept a connection from each expected rank; end those of others."""
    incoming: Connections = []
    length = len(next(iter(expected)))
    while expected:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise RankLost(f"rank {_names(expected.values())} has not connected in time")
        listener.settimeout(left_s)
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(max(SHORT_S, deadline - time.monotonic()))
            with suppress(OSError):
                rank = expected.pop(connection.recv(length, socket.MSG_WAITALL), None)
                if rank is not None:
                    incoming.append((rank, opened.enter_context(connection)))
                    continue
            connection.close()
    return incoming


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


# --- messages


def _exchange(outgoing: Connections, incoming: Connections, nbytes: int, timeout_s: float) -> Inflow:
    """Send a message by each outgoing connection while receiving one by each incoming connection."""
    inflow, left = Inflow(len(incoming), nbytes), [nbytes] * len(outgoing)
    out, into = memoryview(bytes(AT_ONCE)), bytearray(AT_ONCE)
    with selectors.DefaultSelector() as selector:
        for direction, connections in ((selectors.EVENT_WRITE, outgoing), (selectors.EVENT_READ, incoming)):
            for index, (_, connection) in enumerate(connections):
                connection.setblocking(False)
                selector.register(connection, direction, index)
        while any(left) or not inflow.is_complete:
            ready = selector.select(timeout_s)
            if not ready:
                silent = [rank for (rank, _), n in zip(incoming, inflow.came, strict=True) if n < nbytes]
                raise RankLost(f"nothing came from rank {_names(silent)} for {timeout_s:.0f} s")
            for key, _ in ready:
                sends = key.events == selectors.EVENT_WRITE
                rank, connection = (outgoing if sends else incoming)[key.data]
                try:
                    if sends:
                        left[key.data] -= connection.send(out[: min(AT_ONCE, left[key.data])])
                        complete = not left[key.data]
                    else:
                        came = connection.recv_into(into)
                        if not came:
                            raise RankLost(f"rank {rank} has closed its connection")
                        inflow.add(key.data, came)
                        complete = inflow.came[key.data] >= nbytes
                except BlockingIOError:
                    continue
                except OSError as broken:
                    raise RankLost(f"the connection to rank {rank} broke: {broken}") from broken
                if complete:
                    selector.unregister(connection)
    return inflow
