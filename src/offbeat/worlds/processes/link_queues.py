"""Queues of links: the seconds of traffic that wait for a receiver at most, `queue_s` of a cluster file.

Several ranks send to one, so that its link is full and nobody else's is. Meanwhile the receiver sends a byte
to the next rank, which sends it back, again and again by a connection of its own:

    queue_s = seconds there and back, in the fullest quarter of the time at least − the same without load

since it takes a while to fill a queue, and the last sender does not fill it alone. How long a queue may
become is for switches and operating systems to say, and how long it is for TCP's congestion control: both are
measured at once. One rank after the other receives.
"""

from __future__ import annotations

import math
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from offbeat.errors import LaunchError, OffbeatError, RankLost
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.server.auth import sign
from offbeat.worlds.processes.server.bootstrap import shared_store, shared_token
from offbeat.worlds.processes.server.discovery import register, resolve
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.store import wait_for

LOAD_S = 1.2  # of the receiver's link
LEAST_BYTES, MOST_BYTES = 1 << 18, 1 << 26  # that come to a receiver
RECEIVERS = 3  # ranks, evenly spread
FULLEST = 0.25  # of the time
IDLE_PROBES, PROBE_EVERY_S = 20, 0.002
MOST_PEERS = 7  # that send to one
CONNECT_S, SHORT_S = 30.0, 0.1  # for all connections; for one, where there is no time left
AT_ONCE = 1 << 16  # bytes of a read or a write
PROBE, LAST = b"p", b"l"  # LAST: no probe will follow
LOADS, PROBES = "loads", "probes"  # what a connection is for
PREFIX = "link-queues"


@dataclass(frozen=True)
class PeerConnection:
    """A connection with another rank."""

    rank: int
    socket: socket.socket


@dataclass
class Links:
    """Connections of a rank: its loads to others and from others, and the two by which probes travel."""

    outgoing: list[PeerConnection] = field(default_factory=list)
    incoming: list[PeerConnection] = field(default_factory=list)
    probing: PeerConnection | None = None  # to the next rank
    probed: PeerConnection | None = None  # from the rank before

    def probes_only(self) -> Links:
        """Return the connections without loads."""
        return Links(probing=self.probing, probed=self.probed)

    def towards(self, receiver: int, rank: int) -> Links:
        """Return the connections that are in use while one rank receives, of this rank's."""
        if rank == receiver:
            return Links(incoming=self.incoming, probing=self.probing)
        before = self.probed is not None and self.probed.rank == receiver
        return Links(
            outgoing=[connection for connection in self.outgoing if connection.rank == receiver],
            probed=self.probed if before else None,
        )


def load_bytes(bits_per_s: float) -> int:
    """Return the bytes that come to a receiver by a link of this rate."""
    return int(max(LEAST_BYTES, min(MOST_BYTES, LOAD_S * bits_per_s / 8)))


def measure_queue(
    port: ProcessPort, device: torch.device, agree: Callable[[bool], bool], nbytes: int
) -> float | None:
    """Let some ranks receive `nbytes`; return the seconds for which a byte waits meanwhile for this one.

    None if this rank is not among them. All ranks call this, with the same number. `agree` waits for all of
    them, and returns whether all have passed True. If some cannot connect, all raise LaunchError.
    """
    with ExitStack() as opened:
        failed: OffbeatError | None = None
        links = Links()
        try:
            links = _connect(port, device, opened)
        except (LaunchError, RankLost) as error:
            failed = error  # once all know
        all_connected = agree(failed is None)
        if failed is not None:
            raise LaunchError(str(failed)) from failed
        if not all_connected:
            raise LaunchError("other ranks could not connect to each other")
        idle = Exchange(links.probes_only(), 0, IDLE_PROBES, port.timeout_s).run()
        queue_s = None
        each = nbytes // min(MOST_PEERS, port.world - 1)
        for receiver in receivers(port.world):
            agree(True)
            found = Exchange(links.towards(receiver, port.rank), each, 1, port.timeout_s).run()
            if port.rank == receiver:
                queue_s = queue_of(idle, found)
        return queue_s


def receivers(world: int) -> list[int]:
    """Return the ranks that receive, one after the other."""
    count = min(RECEIVERS, world)
    return [world * index // count for index in range(count)]


def queue_of(idle: Sequence[float], loaded: Sequence[float]) -> float:
    """Return the seconds in a queue, from the seconds of probes there and back."""
    longest, seconds, fullest_s = 0.0, 0.0, FULLEST * math.fsum(loaded)
    for longest in sorted(loaded, reverse=True):  # one probe follows the other, so each stands for its time
        seconds += longest
        if seconds >= fullest_s:
            break
    return max(0.0, longest - statistics.median(idle))


# --- connections


def _connect(port: ProcessPort, device: torch.device, opened: ExitStack) -> Links:
    """Connect to the next ranks, and accept the ranks before this one."""
    token = shared_token(port, device)
    store = port.failures.store.prefixed(f"{PREFIX}/{sign(token, 'name', '')[:16]}")
    _, (host, tcp_port) = shared_store(SignedStore(store, token), port.rank)
    listener, _ = register(store, token, port.rank, host, tcp_port, insecure=True)
    opened.enter_context(listener)
    patience_s = min(CONNECT_S, port.timeout_s / 2)  # who has failed waits for the others
    deadline = time.monotonic() + patience_s
    distances = range(1, min(MOST_PEERS, port.world - 1) + 1)
    links = Links()
    for rank, purpose in _connections((port.rank + distance) % port.world for distance in distances):
        left_s = max(SHORT_S, deadline - time.monotonic())
        address = wait_for(partial(resolve, store, token, rank, host), left_s)
        if address is None:
            raise RankLost(f"rank {rank} has not said within {patience_s:.0f} s where it listens")
        try:
            connection = opened.enter_context(socket.create_connection(address.endpoint, left_s))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_greeting(token, port.rank, rank, purpose))
        except OSError as failed:
            raise LaunchError(f"rank {rank} cannot be reached at {address.host}: {failed}") from failed
        if purpose == PROBES:
            links.probing = PeerConnection(rank, connection)
        else:
            links.outgoing.append(PeerConnection(rank, connection))
    expected = {
        _greeting(token, rank, port.rank, purpose): (rank, purpose)
        for rank, purpose in _connections((port.rank - distance) % port.world for distance in distances)
    }
    for purpose, accepted in _accept(listener, expected, deadline, opened):
        if purpose == PROBES:
            links.probed = accepted
        else:
            links.incoming.append(accepted)
    return links


def _connections(ranks: Iterable[int]) -> list[tuple[int, str]]:
    """Return the connections with these ranks, and what each is for: probes go to the nearest rank."""
    ranks = list(ranks)
    return [*((rank, LOADS) for rank in ranks), (ranks[0], PROBES)]


def _greeting(token: bytes, sender: int, receiver: int, purpose: str) -> bytes:
    """Return what a rank says first, so that nobody else is taken for it."""
    return sign(token, f"{PREFIX}/{purpose}/{sender}/{receiver}", "").encode()


def _accept(
    listener: socket.socket, expected: dict[bytes, tuple[int, str]], deadline: float, opened: ExitStack
) -> list[tuple[str, PeerConnection]]:
    """Accept the expected connections, each with what it is for; end those of others."""
    accepted: list[tuple[str, PeerConnection]] = []
    length = len(next(iter(expected)))
    while expected:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise RankLost(f"rank {_names(rank for rank, _ in expected.values())} has not connected in time")
        listener.settimeout(left_s)
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(max(SHORT_S, deadline - time.monotonic()))
            with suppress(OSError):
                known = expected.pop(connection.recv(length, socket.MSG_WAITALL), None)
                if known is not None:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    rank, purpose = known
                    accepted.append((purpose, PeerConnection(rank, opened.enter_context(connection))))
                    continue
            connection.close()
    return accepted


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(ranks))))


# --- loads and probes


class Exchange:
    """Loads to and from other ranks; probes meanwhile, as long as that lasts but at least so many."""

    def __init__(self, links: Links, nbytes: int, probes: int, timeout_s: float) -> None:
        self._links = links
        self._unsent = {connection.rank: nbytes for connection in links.outgoing if nbytes}
        self._unread = {connection.rank: nbytes for connection in links.incoming if nbytes}
        self._probes = probes
        self._timeout_s = timeout_s
        self._sent_s: float | None = None  # when the probe was sent that is on its way
        self._next_s = 0.0  # when the next one is due
        self._ended = links.probing is None  # no probe will follow
        self._others_ended = links.probed is None
        self._found: list[float] = []
        self._heard_s = 0.0  # when something last came or went
        self._out, self._into = memoryview(bytes(AT_ONCE)), bytearray(AT_ONCE)

    def run(self) -> list[float]:
        """Run to the end; return the seconds there and back of each probe."""
        self._heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            for connections, events, act in (
                (self._links.outgoing if self._unsent else [], selectors.EVENT_WRITE, self._send),
                (self._links.incoming if self._unread else [], selectors.EVENT_READ, self._receive),
                ([self._links.probing], selectors.EVENT_READ, self._take_back),
                ([self._links.probed], selectors.EVENT_READ, self._send_back),
            ):
                for connection in filter(None, connections):
                    connection.socket.setblocking(False)
                    selector.register(connection.socket, events, partial(act, connection))
            while self._unsent or self._unread or not (self._ended and self._others_ended):
                self._probe()
                for key, _ in selector.select(PROBE_EVERY_S):
                    self._heard_s = time.monotonic()
                    with suppress(BlockingIOError):
                        key.data()
                if time.monotonic() - self._heard_s > self._timeout_s:
                    raise RankLost(f"nothing came from rank {self._silent()} for {self._timeout_s:.0f} s")
        return self._found

    def _probe(self) -> None:
        """Send a probe if one is due, or say that none will follow."""
        connection, now_s = self._links.probing, time.monotonic()
        if connection is None or self._ended or self._sent_s is not None or now_s < self._next_s:
            return
        self._ended = not self._unsent and not self._unread and len(self._found) >= self._probes
        self._write(connection, LAST if self._ended else PROBE)
        if self._ended:
            self._selector.unregister(connection.socket)  # the next rank may be gone soon
        else:
            self._sent_s = now_s

    def _take_back(self, connection: PeerConnection) -> None:
        self._read(connection, self._into)
        if self._sent_s is not None:
            now_s = time.monotonic()
            self._found.append(now_s - self._sent_s)
            self._sent_s, self._next_s = None, now_s + PROBE_EVERY_S

    def _send_back(self, connection: PeerConnection) -> None:
        count = self._read(connection, self._into)
        if LAST in self._into[:count]:
            self._others_ended = True
            self._selector.unregister(connection.socket)
        else:
            self._write(connection, PROBE)

    def _send(self, connection: PeerConnection) -> None:
        self._unsent[connection.rank] -= self._write(connection, self._out[: self._unsent[connection.rank]])
        if not self._unsent[connection.rank]:
            del self._unsent[connection.rank]
            self._selector.unregister(connection.socket)

    def _receive(self, connection: PeerConnection) -> None:
        left = self._unread[connection.rank] - self._read(connection, self._into)
        self._unread[connection.rank] = left
        if left <= 0:
            del self._unread[connection.rank]
            self._selector.unregister(connection.socket)

    def _write(self, connection: PeerConnection, data: bytes | memoryview) -> int:
        try:
            return connection.socket.send(data)
        except BlockingIOError:
            raise
        except OSError as broken:
            raise RankLost(f"the connection to rank {connection.rank} broke: {broken}") from broken

    def _read(self, connection: PeerConnection, into: bytearray) -> int:
        try:
            count = connection.socket.recv_into(into)
        except BlockingIOError:
            raise
        except OSError as broken:
            raise RankLost(f"the connection to rank {connection.rank} broke: {broken}") from broken
        if not count:
            raise RankLost(f"rank {connection.rank} has closed its connection")
        return count

    def _silent(self) -> str:
        """Name the ranks from which something is missing."""
        probing, probed = self._links.probing, self._links.probed
        unanswered = {probing.rank} if probing is not None and self._sent_s is not None else set()
        unended = {probed.rank} if probed is not None and not self._others_ended else set()
        return _names({*self._unread, *self._unsent, *unanswered, *unended})
