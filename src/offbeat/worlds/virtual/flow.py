"""Flow-level network: concurrent transfers on shared links get max-min fair speeds.

A transfer puts bytes on several links at once and moves on all of them in step; its speed is measured on its
busiest link. The speeds of all transfers rise alike, in bytes per second, until a link is full; the transfers
on that link keep the speed reached, and the other speeds rise further (progressive filling). So where
transfers put all their bytes on each of their links, as rings and messages do, every full link is divided
evenly. There is no clock here: an event loop asks for `next_event`, calls `advance` with that time, and
starts transfers at its current time.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NO_NODES: Ints = np.zeros(0, dtype=np.int64)


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

    @property
    def alone_s(self) -> float:
        """Seconds from start to arrival with no other transfer in progress."""
        return self.nbytes / self.route.alone_bytes_per_s + self.route.latency_s


_ROW = np.dtype(
    [("left", "f8"), ("since", "f8"), ("speed", "f8"), ("end", "f8"), ("order", "i8"), ("transfer", "O")]
)


class FlowNetwork:
    """Links of given capacity, and the transfers on them. Simultaneous arrivals are in order of start."""

    def __init__(self, bytes_per_s: Floats) -> None:
        self.bytes_per_s = bytes_per_s
        self.now_s = 0.0
        self._started = 0
        self._users = np.zeros(len(bytes_per_s), dtype=np.int64)
        self._outdated = False  # whether speeds must be computed again, as of now_s
        self._starting: list[tuple[int, Transfer]] = []  # started at now_s, and not yet in the arrays
        # one row per transfer on its links, with `left` bytes at time `since`
        self._rows = np.empty(0, dtype=_ROW)
        # one entry per link of each row, in order: the row, the link, and the link's weight
        self._row = np.empty(0, dtype=np.int64)
        self._link = np.empty(0, dtype=np.int64)
        self._weight = np.empty(0)
        # a heap of transfers off their links, until their latency has passed
        self._arriving: list[tuple[float, int, Transfer]] = []

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
        links = transfer.route.links
        if transfer.nbytes == 0 or not len(links):
            self._arrive(self._started, transfer)
            return
        self._users[links] += 1
        # a transfer alone on its links changes no other speed, so even a wide ring costs little
        self._outdated = self._outdated or bool(self._users[links].max() > 1)
        self._starting.append((self._started, transfer))

    def next_event(self) -> float | None:
        """Return the time of the next `advance`: a transfer arrives or frees its links. None: never."""
        self._recompute_rates()
        times = [self._arriving[0][0]] if self._arriving else []
        times += [float(self._rows["end"].min())] if len(self._rows) else []
        return min(times, default=None)

    def advance(self, now_s: float) -> list[Transfer]:
        """Advance the time to `now_s`; return the transfers that have arrived, in order of arrival."""
        self._move_clock(now_s)
        self._end_until(now_s)
        arrived = []
        while self._arriving and self._arriving[0][0] <= now_s:
            arrived.append(heapq.heappop(self._arriving)[2])
        return arrived

    def cancel(self, now_s: float, transfer: Transfer) -> None:
        """Remove a transfer that has not arrived; one that has arrived is not changed."""
        self._move_clock(now_s)
        self._recompute_rates()
        self._remove(self._rows["transfer"] == transfer)
        self._arriving = [each for each in self._arriving if each[2] is not transfer]
        heapq.heapify(self._arriving)

    def set_rate(self, now_s: float, links: Ints, bytes_per_s: float) -> None:
        """Change the capacity of links from now on; routes built before must not be started any more."""
        self._move_clock(now_s)
        self._recompute_rates()
        self.bytes_per_s[links] = bytes_per_s
        self._outdated = True

    def speed(self, transfer: Transfer) -> float:
        """Return the current bytes per second on the transfer's busiest link; 0 if it is off its links."""
        self._recompute_rates()
        return float(self._rows["speed"][self._rows["transfer"] == transfer].sum())

    def load(self) -> Floats:
        """Return the current bytes per second on every link."""
        self._recompute_rates()
        flow = self._weight * self._rows["speed"][self._row]
        return np.bincount(self._link, flow, len(self.bytes_per_s)).astype(np.float64)

    # --- internals

    def _move_clock(self, now_s: float) -> None:
        if not now_s >= self.now_s:
            raise ValueError(f"time cannot go from {self.now_s!r} to {now_s!r}")
        if now_s > self.now_s:  # speeds are computed once for many starts at one time
            self._end_until(now_s)
            self.now_s = now_s

    def _end_until(self, until_s: float) -> None:
        """Remove from their links the transfers that end by `until_s`, one end time after another."""
        self._recompute_rates()
        while len(self._rows) and (end := float(self._rows["end"].min())) <= until_s:
            self.now_s = end
            ended = self._rows["end"] <= end
            for row in self._rows[ended]:
                self._arrive(int(row["order"]), row["transfer"])
            self._remove(ended)
            self._recompute_rates()

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
        orders, transfers = zip(*self._starting, strict=True)
        routes = [transfer.route for transfer in transfers]
        rows = np.empty(len(transfers), dtype=_ROW)
        rows["transfer"] = transfers
        rows["order"] = orders
        rows["left"] = [transfer.nbytes for transfer in transfers]
        rows["since"] = self.now_s
        rows["speed"] = [route.alone_bytes_per_s for route in routes]
        rows["end"] = self.now_s + rows["left"] / rows["speed"]
        row = np.repeat(np.arange(len(rows)) + len(self._rows), [len(route.links) for route in routes])
        self._rows = np.concatenate([self._rows, rows])
        self._row = np.concatenate([self._row, row])
        self._link = np.concatenate([self._link, *(route.links for route in routes)])
        self._weight = np.concatenate([self._weight, *(route.weights for route in routes)])
        self._starting = []

    def _fair_speeds(self) -> Floats:
        """Compute speeds by progressive filling.

        A link's level is the speed at which it would be full if all speeds on it kept rising.
        """
        busy = self._users > 0
        row, link, weight = self._row, (np.cumsum(busy) - 1)[self._link], self._weight
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
