"""Flow-level network: concurrent transfers on shared links get max-min fair speeds.

A transfer puts bytes on several links at once and moves on all of them in step; its speed is measured on its
busiest link. The speeds of all transfers rise alike, in bytes per second, until a link is full; the transfers
on that link keep the speed reached, and the other speeds rise further (progressive filling). So where
transfers put all their bytes on each of their links, as rings and messages do, every full link is divided
evenly. There is no clock here: an event
loop asks for `next_event`, calls `advance` with that time, and starts transfers at its current time.

Transfers that start together may be a `Bundle`: those of them that arrive together are then one event. A
message whose links have room for all that is on them is kept apart until one of them has not (`solos.py`).
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.worlds.virtual.solos import Flow, Solos

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NO_NODES: Ints = np.zeros(0, dtype=np.int64)
FEW = 4  # links of a message: two NICs and two uplinks


@dataclass(frozen=True, eq=False, kw_only=True)
class Route:
    """Links of a transfer, each with the fraction of the bytes that it carries: 1 on the busiest link."""

    links: Ints
    weights: Floats
    alone_bytes_per_s: float  # with no other transfer in progress
    latency_s: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfer:
    """Bytes along a route; for the ledger, `sent[i]` whole bytes leave the NIC of `senders[i]`."""

    route: Route
    nbytes: float  # on the busiest link
    senders: Ints = field(default_factory=lambda: _NO_NODES)
    sent: Ints = field(default_factory=lambda: _NO_NODES)
    slow_start_s: float = 0.0  # lost where the connections have been idle
    rtt_s: float = 0.0  # of the connections

    @property
    def alone_s(self) -> float:
        """Seconds from start to arrival with no other transfer in progress."""
        return self.nbytes / self.route.alone_bytes_per_s + self.route.latency_s


@dataclass(frozen=True, eq=False, kw_only=True)
class Bundle:
    """Transfers that start together, in order, without latencies; as arrays, which can be used again."""

    size: int
    at_once: list[int]  # the transfers without bytes, or without links
    rows: Ints  # the other transfers
    nbytes: Floats  # of each row, and so on
    alone_bytes_per_s: Floats
    entry: Ints  # for each link of each row, in order: the row
    links: Ints
    weights: Floats
    only: Flow | None  # of a single transfer on few links, as a message is

    @classmethod
    def of(cls, routes: Sequence[Route], nbytes: Sequence[float]) -> "Bundle":
        """Build a bundle from the routes of its transfers, and their bytes on the busiest link."""
        moving = [i for i, (r, n) in enumerate(zip(routes, nbytes, strict=True)) if n and len(r.links)]
        of = [routes[i] for i in moving]
        return cls(
            size=len(routes),
            at_once=sorted(set(range(len(routes))) - set(moving)),
            rows=np.array(moving, dtype=np.int64),
            nbytes=np.array([nbytes[i] for i in moving], dtype=np.float64),
            alone_bytes_per_s=np.array([route.alone_bytes_per_s for route in of], dtype=np.float64),
            entry=np.repeat(np.arange(len(of)), [len(route.links) for route in of]),
            links=np.concatenate([_NO_NODES, *(route.links for route in of)]),
            weights=np.concatenate([np.empty(0), *(route.weights for route in of)]),
            only=_flow(of[0], nbytes[moving[0]]) if len(of) == 1 and len(of[0].links) <= FEW else None,
        )


def _flow(route: Route, nbytes: float) -> Flow:
    speed = route.alone_bytes_per_s
    loads = (float(weight) * speed for weight in route.weights)
    return Flow(tuple(zip(route.links.tolist(), loads, strict=True)), float(nbytes) / speed)


Landed = Callable[[list[int]], None]


@dataclass(frozen=True, eq=False, slots=True)
class _Flight:
    """A bundle under way."""

    first: int  # the order of its first transfer
    landed: Landed


class Landing(NamedTuple):
    """Transfers of a bundle that have arrived together: call `landed` with their numbers in the bundle."""

    landed: Landed
    parts: list[int]


class _Start(NamedTuple):
    """Transfers that are not in the arrays, and start, or started, at `since_s`."""

    first: int  # order
    owner: Transfer | _Flight
    bundle: Bundle
    since_s: float


_ROW = np.dtype(
    [
        ("left", "f8"),
        ("since", "f8"),
        ("speed", "f8"),
        ("end", "f8"),
        ("order", "i8"),
        ("owner", "O"),
    ]
)


class FlowNetwork:
    """Links of given capacity, and the transfers on them. Simultaneous arrivals are in order of start."""

    def __init__(self, bytes_per_s: Floats) -> None:
        self.bytes_per_s = bytes_per_s
        self.now_s = 0.0
        self._started = 0
        self._users = np.zeros(len(bytes_per_s), dtype=np.int64)
        self._outdated = False  # whether speeds must be computed again, as of now_s
        self._starting: list[_Start] = []  # at now_s, or alone on their links until then
        self._solos: Solos[_Start] = Solos(bytes_per_s)
        # one row per transfer on its links, with `left` bytes at time `since`
        self._rows = np.empty(0, dtype=_ROW)
        # one entry per link of each row, in order: the row, the link, and the link's weight
        self._row = np.empty(0, dtype=np.int64)
        self._link = np.empty(0, dtype=np.int64)
        self._weight = np.empty(0)
        # a heap of transfers off their links, until their latency has passed
        self._arriving: list[tuple[float, int, Transfer | Landing]] = []

    def route(self, demand: Mapping[int, float], latency_s: float = 0.0) -> Route:
        """Return the route whose links carry bytes in proportion to `demand`."""
        return self.route_of(
            np.array(list(demand), dtype=np.int64),
            np.array(list(demand.values()), dtype=np.float64),
            latency_s,
        )

    def route_of(self, links: Ints, demand: Floats, latency_s: float = 0.0) -> Route:
        """Return a route from arrays without repeated links; unlimited links never matter and are omitted."""
        matters = (demand > 0) & np.isfinite(self.bytes_per_s[links])
        weights = demand[matters] / demand.max(initial=0.0)
        links = links[matters]
        alone = float((self.bytes_per_s[links] / weights).min(initial=math.inf))
        return Route(links=links, weights=weights, alone_bytes_per_s=alone, latency_s=latency_s)

    # --- called by an event loop

    def start(self, now_s: float, transfer: Transfer) -> None:
        """Start a transfer on its links."""
        self._move_clock(now_s)
        self._started += 1
        bundle = Bundle.of([transfer.route], [transfer.nbytes])
        if bundle.at_once:
            self._arrive(self._started, transfer)
        else:
            self._begin(_Start(self._started, transfer, bundle, self.now_s))

    def start_all(self, now_s: float, bundle: Bundle, landed: Landed) -> None:
        """Start the transfers of a bundle, in order; `advance` returns them with `landed`, as they arrive."""
        self._move_clock(now_s)
        first = self._started + 1
        self._started += bundle.size
        if bundle.at_once:
            landing = Landing(landed, bundle.at_once)
            heapq.heappush(self._arriving, (self.now_s, first + bundle.at_once[0], landing))
        if len(bundle.rows):
            self._begin(_Start(first, _Flight(first, landed), bundle, self.now_s))

    def next_event(self) -> float | None:
        """Return the time of the next `advance`: a transfer arrives or frees its links. None: never."""
        if self._starting or self._outdated:
            self._recompute_rates()
        first_s = self._first_end_s()
        if self._arriving and self._arriving[0][0] < first_s:
            return self._arriving[0][0]
        return first_s if first_s < math.inf else None

    def advance(self, now_s: float) -> list[Transfer | Landing]:
        """Advance the time to `now_s`; return what has arrived, in order of arrival."""
        if now_s == self.now_s:
            self._end_until(now_s)
        else:
            self._move_clock(now_s)
        arrived = []
        while self._arriving and self._arriving[0][0] <= now_s:
            arrived.append(heapq.heappop(self._arriving)[2])
        return arrived

    def cancel(self, now_s: float, transfer: Transfer) -> None:
        """Remove a transfer that has not arrived; one that has arrived is not changed."""
        self._move_clock(now_s)
        self._gather()
        self._remove(self._rows["owner"] == transfer)
        self._arriving = [each for each in self._arriving if each[2] is not transfer]
        heapq.heapify(self._arriving)

    def set_rate(self, now_s: float, links: Ints, bytes_per_s: float) -> None:
        """Change the capacity of links from now on; routes built before must not be started any more."""
        self._move_clock(now_s)
        self._gather()
        self.bytes_per_s[links] = bytes_per_s
        self._outdated = True

    def speed(self, transfer: Transfer) -> float:
        """Return the current bytes per second on the transfer's busiest link; 0 if it is off its links."""
        self._gather()
        return float(self._rows["speed"][self._rows["owner"] == transfer].sum())

    def load(self) -> Floats:
        """Return the current bytes per second on every link."""
        self._gather()
        flow = self._weight * self._rows["speed"][self._row]
        return np.bincount(self._link, flow, len(self.bytes_per_s)).astype(np.float64)

    # --- internals

    def _begin(self, start: _Start) -> None:
        """Start transfers on their links: in the arrays, with all that they meet there, or kept apart."""
        bundle, flow = start.bundle, start.bundle.only
        met = self._starting or (len(self._rows) and self._users[bundle.links].any())
        if flow is None or met or not self._solos.have_room(flow):
            self._starting += [*self._solos.take_met(bundle.links.tolist()), start]
        else:
            self._solos.add(flow, start.since_s + flow.alone_s, start.first, start)

    def _gather(self) -> None:
        """Bring all transfers into the arrays, with their speeds."""
        self._starting += self._solos.take_all()
        self._recompute_rates()

    def _first_end_s(self) -> float:
        """Return the time at which the first transfer will be off its links; infinite if there is none."""
        solo_s = self._solos.first_end_s
        return min(solo_s, float(self._rows["end"].min())) if len(self._rows) else solo_s

    def _move_clock(self, now_s: float) -> None:
        if not now_s >= self.now_s:
            raise ValueError(f"time cannot go from {self.now_s!r} to {now_s!r}")
        if now_s > self.now_s:  # speeds are computed once for many starts at one time
            self._end_until(now_s)
            self.now_s = now_s

    def _end_until(self, until_s: float) -> None:
        """Remove from their links the transfers that end by `until_s`, one end time after another."""
        if self._starting or self._outdated:
            self._recompute_rates()
        while (end := self._first_end_s()) <= until_s:
            self.now_s = end
            for solo in self._solos.take_ended(end):
                self._land(solo.owner, [solo.first + int(solo.bundle.rows[0])])
            if not len(self._rows):
                continue
            ended = self._rows["end"] <= end
            rows = self._rows[ended]
            orders = zip(rows["owner"].tolist(), rows["order"].tolist(), strict=True)
            for owner, group in groupby(orders, key=itemgetter(0)):
                self._land(owner, [order for _, order in group])
            self._remove(ended)
            self._recompute_rates()

    def _land(self, owner: Transfer | _Flight, orders: list[int]) -> None:
        """Free a transfer, or those of a bundle that end together: nothing else has an order in between."""
        if isinstance(owner, Transfer):
            self._arrive(orders[0], owner)
        else:
            landing = Landing(owner.landed, [order - owner.first for order in orders])
            heapq.heappush(self._arriving, (self.now_s, orders[0], landing))

    def _arrive(self, order: int, transfer: Transfer) -> None:
        heapq.heappush(self._arriving, (self.now_s + transfer.route.latency_s, order, transfer))

    def _remove(self, rows: npt.NDArray[np.bool_]) -> None:
        removed = rows[self._row]
        links = self._link[removed]
        np.subtract.at(self._users, links, 1)
        self._outdated = self._outdated or bool(self._users[links].any())
        self._rows = self._rows[~rows]
        self._row = (np.cumsum(~rows) - 1)[self._row[~removed]]
        self._link, self._weight = self._link[~removed], self._weight[~removed]

    def _recompute_rates(self) -> None:
        """Add the transfers that started at now_s, and recompute speeds if a link's users have changed."""
        if self._starting:
            self._add_rows()
        if self._outdated:
            self._outdated = False
            speed = self._fair_speeds()
            changed = speed != self._rows["speed"]  # other rows keep their ends to the last bit
            rows, speed = self._rows[changed], speed[changed]
            rows["left"] = np.maximum(rows["left"] - rows["speed"] * (self.now_s - rows["since"]), 0.0)
            rows["since"] = self.now_s
            rows["speed"] = speed
            rows["end"] = self.now_s + rows["left"] / speed
            self._rows[changed] = rows

    def _add_rows(self) -> None:
        self._starting.sort(key=itemgetter(0))
        firsts, owners, bundles, since_s = zip(*self._starting, strict=True)
        counts = [len(bundle.rows) for bundle in bundles]
        rows = np.empty(sum(counts), dtype=_ROW)
        rows["owner"] = np.repeat(np.array(owners, dtype=object), counts)
        rows["order"] = np.repeat(firsts, counts) + np.concatenate([bundle.rows for bundle in bundles])
        rows["left"] = np.concatenate([bundle.nbytes for bundle in bundles])
        rows["since"] = np.repeat(since_s, counts)
        rows["speed"] = np.concatenate([bundle.alone_bytes_per_s for bundle in bundles])
        rows["end"] = rows["since"] + rows["left"] / rows["speed"]
        entries = np.concatenate([bundle.entry for bundle in bundles])
        before = np.cumsum([len(self._rows), *counts[:-1]])
        entries += np.repeat(before, [len(bundle.entry) for bundle in bundles])
        links = np.concatenate([bundle.links for bundle in bundles])
        np.add.at(self._users, links, 1)
        # a transfer alone on its links changes no other speed, so even a wide ring costs little
        self._outdated = self._outdated or bool(self._users[links].max() > 1)
        self._rows = np.concatenate([self._rows, rows])
        self._row = np.concatenate([self._row, entries])
        self._link = np.concatenate([self._link, links])
        self._weight = np.concatenate([self._weight, *(bundle.weights for bundle in bundles)])
        self._starting = []
        if firsts[0] < self._rows["order"][: before[0]].max(initial=0):
            self._sort_rows()

    def _sort_rows(self) -> None:
        """Order rows and their links by start, as if none had been alone: sums depend on it."""
        order = np.argsort(self._rows["order"])
        self._rows = self._rows[order]
        self._row = np.argsort(order)[self._row]
        entries = np.argsort(self._row, kind="stable")
        self._row, self._link, self._weight = self._row[entries], self._link[entries], self._weight[entries]

    def _fair_speeds(self) -> Floats:
        """Compute speeds by progressive filling.

        A link's level is the speed at which it would be full if all speeds on it kept rising.
        """
        busy = self._users > 0
        row, link = self._row, (np.cumsum(busy) - 1)[self._link]
        weight = self._weight
        spare = self.bytes_per_s[busy]
        level = np.zeros(len(spare))
        speed = np.zeros(len(self._rows))
        while len(row):
            wanted = np.bincount(link, weight, len(spare))
            # levels only rise as other speeds become final; the maximum guards against rounding
            np.maximum(level, np.divide(spare, wanted, out=level.copy(), where=wanted > 0), out=level)
            entry_level = level[link]
            first = np.flatnonzero(np.diff(row, prepend=-1))
            lowest = np.repeat(np.minimum.reduceat(entry_level, first), np.diff(first, append=len(row)))
            # A level is certain if no speed on the link becomes final below it. The lowest level always is;
            # taking all certain levels at once makes many rounds few.
            uncertain = np.zeros(len(spare), dtype=np.bool_)
            uncertain[link[entry_level > lowest]] = True
            certain = ~uncertain[link]
            speed[row[certain]] = entry_level[certain]
            final = speed[row] > 0
            spare -= np.bincount(link[final], weight[final] * speed[row[final]], len(spare))
            row, link, weight = row[~final], link[~final], weight[~final]
        return speed
