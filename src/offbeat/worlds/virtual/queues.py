"""Links with queues: each serves its packets one after another, first come, first served.

    message        at most `PACKETS` packets, none shorter than TCP's
    sender's NIC   at most `AT_SENDER` packets of a message wait there, so its messages take turns
    other links    a packet follows all that came before it, and is passed on while it comes (cut-through)
    in flight      of a message: at most the receiver's queue, divided among the messages on their way to it

The first three are what operating systems (TCP small queues) and switches do. The last is what TCP's
congestion control comes to where a queue would overflow. The one number is the queue's length, `queue_s` of a
cluster file: the seconds of traffic that wait for a receiver at most. `offbeat calibrate` measures it.

`flow.py` divides every link evenly at each moment, and holds a sender up as soon as a receiver is busy. Here
whoever comes first is served first, and a queue takes what a receiver cannot. So workers that are alike fall
back into phase, and those that are not leave links idle for less of the time (docs/virtual.md).

An operation of many nodes, such as a ring, is a message on each of its links, and ends with the last of them.
Packets that wait when the rate of their link changes keep their times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from offbeat.worlds.virtual.flow import Landed, Landing, Transfer

PACKETS = 16  # of a message; with 32 no prediction changed by more than 3% (docs/log.md)
LEAST_BYTES = 1448  # of a packet
AT_SENDER = 2  # packets of a message

Links = tuple[int, ...]


class _Message:
    """A message on its way, or the part of an operation that is on one link."""

    __slots__ = (
        *("arrived", "in_flight", "is_cancelled", "left", "links"),
        *("packet_bytes", "undelivered", "unsent", "waiting"),
    )

    def __init__(
        self, links: Links, nbytes: float, left: Callable[[], None] | None, arrived: Callable[[], None]
    ) -> None:
        packets = max(1, min(PACKETS, math.ceil(nbytes / LEAST_BYTES)))
        self.links = links
        self.packet_bytes = nbytes / packets
        self.unsent = self.undelivered = packets
        self.waiting = 0  # packets at the sender's NIC
        self.in_flight = 0  # packets that were sent and not delivered, those included
        self.left = left  # is called when the last packet has left the sender's NIC
        self.arrived = arrived  # … when it has been delivered
        self.is_cancelled = False


class _Operation:
    """An operation on its links, and how many of its parts are not there yet."""

    __slots__ = ("missing", "parts", "transfer")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.parts: list[_Message] = []
        self.missing = 0


class _Event(NamedTuple):
    """A packet has left its sender's NIC, or has been delivered."""

    time_s: float
    order: int
    message: _Message
    is_delivery: bool


class Queues:
    """Messages and operations on links with queues. Ties are broken by what was caused first."""

    def __init__(self, bytes_per_s: Iterable[float], queue_s: float) -> None:
        self.now_s = 0.0
        self._bytes_per_s = list(map(float, bytes_per_s))
        self._queue_s = queue_s
        self._free_s = [0.0] * len(self._bytes_per_s)  # when a link has served all packets that it has
        self._coming = [0] * len(self._bytes_per_s)  # messages on their way, by their last link
        self._events: list[_Event] = []  # a heap
        self._order = 0
        self._operations: dict[int, _Operation] = {}  # on their links, by the id of the transfer
        self._off_links: list[tuple[float, int, Transfer]] = []  # a heap of operations, by their arrival
        self._arrived: list[Transfer | Landing] = []  # what `advance` will return

    # --- called by an event loop

    def start(self, now_s: float, transfer: Transfer) -> None:
        """Start an operation on all of its links."""
        self._run_until(now_s)
        operation, route = _Operation(transfer), transfer.route
        for link, weight in zip(route.links.tolist(), route.weights.tolist(), strict=True):
            if nbytes := transfer.nbytes * weight:
                operation.parts.append(_Message((link,), nbytes, None, partial(self._leave_link, operation)))
        operation.missing = len(operation.parts)
        if operation.parts:
            self._operations[id(transfer)] = operation
            self._begin(operation.parts)
        else:
            self._leave_links(transfer)

    def send(
        self, now_s: float, links: Sequence[Links], sizes: Sequence[float], left: Landed, landed: Landed
    ) -> None:
        """Start messages together, in order; `advance` returns `left` and `landed` with their numbers."""
        self._run_until(now_s)
        messages: list[_Message] = []
        for part, (path, nbytes) in enumerate(zip(links, sizes, strict=True)):
            gone = partial(self._arrive, Landing(left, [part]))
            here = partial(self._arrive, Landing(landed, [part]))
            if nbytes and path:
                messages.append(_Message(path, nbytes, gone, here))
            else:
                gone()
                here()
        self._begin(messages)

    def next_event(self) -> float | None:
        """Return the time of the next `advance`. None: never."""
        if self._arrived:
            return self.now_s
        next_s = [heap[0][0] for heap in (self._events, self._off_links) if heap]
        return min(next_s, default=None)

    def advance(self, now_s: float) -> list[Transfer | Landing]:
        """Advance the time to `now_s`; return what has left or arrived, in order."""
        self._run_until(now_s)
        while self._off_links and self._off_links[0][0] <= now_s:
            self._arrived.append(heapq.heappop(self._off_links)[2])
        arrived, self._arrived = self._arrived, []
        return arrived

    def cancel(self, now_s: float, transfer: Transfer) -> None:
        """End an operation that has not arrived; packets that wait on its links still take their time."""
        self._run_until(now_s)
        operation = self._operations.pop(id(transfer), None)
        for part in operation.parts if operation else ():
            if part.undelivered:
                part.is_cancelled = True
                self._coming[part.links[-1]] -= 1
        self._off_links = [each for each in self._off_links if each[2] is not transfer]
        heapq.heapify(self._off_links)

    def set_rate(self, now_s: float, links: Iterable[int], bytes_per_s: float) -> None:
        """Change the rate of links for packets that are sent from now on."""
        self._run_until(now_s)
        for link in links:
            self._bytes_per_s[link] = bytes_per_s

    # --- internals

    def _begin(self, messages: Sequence[_Message]) -> None:
        for message in messages:
            self._coming[message.links[-1]] += 1
        for message in messages:
            self._feed(message)

    def _feed(self, message: _Message) -> None:
        """Give the sender's NIC the next packets of a message, as far as may wait there and be in flight."""
        first, last, nbytes = message.links[0], message.links[-1], message.packet_bytes
        while message.unsent and message.waiting < AT_SENDER:
            window = self._queue_s * self._bytes_per_s[last] / self._coming[last]
            if message.in_flight and (message.in_flight + 1) * nbytes > window:
                return  # the next delivery feeds it
            message.unsent -= 1
            message.waiting += 1
            message.in_flight += 1
            self._free_s[first] = max(self._free_s[first], self.now_s) + nbytes / self._bytes_per_s[first]
            self._schedule(self._free_s[first], message, is_delivery=False)

    def _schedule(self, time_s: float, message: _Message, is_delivery: bool) -> None:
        self._order += 1
        heapq.heappush(self._events, _Event(time_s, self._order, message, is_delivery))

    def _run_until(self, until_s: float) -> None:
        while self._events and self._events[0].time_s <= until_s:
            event = heapq.heappop(self._events)
            message, self.now_s = event.message, event.time_s
            if message.is_cancelled:
                continue
            if event.is_delivery:
                self._deliver(message)
            else:
                self._pass_on(message)
            self._feed(message)
        self.now_s = until_s

    def _pass_on(self, message: _Message) -> None:
        """Send a packet that has left its sender's NIC along the other links."""
        message.waiting -= 1
        end_s, nbytes = self.now_s, message.packet_bytes
        begin_s = end_s - nbytes / self._bytes_per_s[message.links[0]]
        for link in message.links[1:]:
            begin_s = max(self._free_s[link], begin_s)
            end_s = max(end_s, begin_s + nbytes / self._bytes_per_s[link])
            self._free_s[link] = end_s
        if message.left and not message.unsent and not message.waiting:
            message.left()
        if end_s > self.now_s:
            self._schedule(end_s, message, is_delivery=True)
        else:
            self._deliver(message)

    def _deliver(self, message: _Message) -> None:
        message.in_flight -= 1
        message.undelivered -= 1
        if not message.undelivered:
            self._coming[message.links[-1]] -= 1
            message.arrived()

    def _arrive(self, landing: Landing) -> None:
        self._arrived.append(landing)

    def _leave_link(self, operation: _Operation) -> None:
        operation.missing -= 1
        if not operation.missing:
            del self._operations[id(operation.transfer)]
            self._leave_links(operation.transfer)

    def _leave_links(self, transfer: Transfer) -> None:
        """Let an operation arrive when its latency has passed."""
        self._order += 1
        heapq.heappush(self._off_links, (self.now_s + transfer.route.latency_s, self._order, transfer))
