"""Fluid flow on shared links: transfers that are under way together get max-min fair speeds.

A transfer puts bytes on several links at once and moves on all of them in step; its speed is counted on its
busiest link. All transfers speed up alike, in bytes per second, until a link is full; those on it have their
speed, the others go on (progressive filling). So where transfers put all their bytes on each of their links,
as rings and messages do, every full link is shared evenly. There is no clock here: an event loop asks
`next_event`, calls `advance` with that time, and starts transfers at whatever time it has reached.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NOBODY: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Route:
    """Different links, and how much of a transfer's bytes each carries: 1 on the busiest, or less."""

    links: Ints
    weights: Floats
    alone_bytes_per_s: float  # with nothing else under way
    latency_s: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfer:
    """Bytes along a route, and the ledger's whole bytes: `sent[i]` left the NIC of `senders[i]`."""

    route: Route
    nbytes: float  # on the busiest link
    senders: Ints = field(default_factory=lambda: _NOBODY)
    sent: Ints = field(default_factory=lambda: _NOBODY)

    @property
    def alone_s(self) -> float:
        """Seconds from start to arrival with nothing else under way."""
        return self.nbytes / self.route.alone_bytes_per_s + self.route.latency_s


_ROW = np.dtype(
    [("left", "f8"), ("since", "f8"), ("speed", "f8"), ("end", "f8"), ("order", "i8"), ("transfer", "O")]
)


class FlowNetwork:
    """Links of given capacity, and the transfers on them. Times never go back; ties go by order of start."""

    def __init__(self, bytes_per_s: Floats) -> None:
        self.bytes_per_s = bytes_per_s
        self.now_s = 0.0
        self._started = 0
        self._users = np.zeros(len(bytes_per_s), dtype=np.int64)
        self._uneven = False  # links are to be shared out anew, as of now_s
        self._joining: list[tuple[int, Transfer]] = []  # started at now_s, and not yet in the arrays
        self._rows = np.empty(0, dtype=_ROW)  # a row for each transfer on its links; `left` bytes at `since`
        self._row = np.empty(
            0, dtype=np.int64
        )  # with the next two, an entry for each link of each row, in order
        self._link = np.empty(0, dtype=np.int64)
        self._weight = np.empty(0)
        self._arriving: list[tuple[float, int, Transfer]] = []  # a heap: off the links, latency still to pass

    def route(self, demand: Mapping[int, float], latency_s: float = 0.0) -> Route:
        """The route whose links carry bytes in proportion to `demand`."""
        return self.route_of(
            np.array(list(demand), dtype=np.int64),
            np.array(list(demand.values()), dtype=np.float64),
            latency_s,
        )

    def route_of(self, links: Ints, demand: Floats, latency_s: float = 0.0) -> Route:
        """`route` for arrays; no link may come twice. Unlimited links never matter, and are left out."""
        matters = (demand > 0) & np.isfinite(self.bytes_per_s[links])
        weights = demand[matters] / demand.max(initial=0.0)
        links = links[matters]
        alone = float((self.bytes_per_s[links] / weights).min(initial=math.inf))
        return Route(links=links, weights=weights, alone_bytes_per_s=alone, latency_s=latency_s)

    # --- what an event loop calls

    def start(self, now_s: float, transfer: Transfer) -> None:
        """Put a transfer on its links."""
        self._move(now_s)
        self._started += 1
        links = transfer.route.links
        if transfer.nbytes == 0 or not len(links):
            self._arrive(self._started, transfer)
            return
        self._users[links] += 1
        # a transfer that meets nobody leaves all speeds as they are, so even a wide ring costs little
        self._uneven = self._uneven or bool(self._users[links].max() > 1)
        self._joining.append((self._started, transfer))

    def next_event(self) -> float | None:
        """When to call `advance` next: a transfer arrives, or leaves its links to others. None: never."""
        self._settle()
        times = [self._arriving[0][0]] if self._arriving else []
        times += [float(self._rows["end"].min())] if len(self._rows) else []
        return min(times, default=None)

    def advance(self, now_s: float) -> list[Transfer]:
        """Let time pass; returns the transfers that have arrived, in order of arrival."""
        self._move(now_s)
        self._leave_links(now_s)
        arrived = []
        while self._arriving and self._arriving[0][0] <= now_s:
            arrived.append(heapq.heappop(self._arriving)[2])
        return arrived

    def cancel(self, now_s: float, transfer: Transfer) -> None:
        """Take a transfer back, wherever it is; nothing happens to one that has arrived."""
        self._move(now_s)
        self._settle()
        self._remove(self._rows["transfer"] == transfer)
        self._arriving = [each for each in self._arriving if each[2] is not transfer]
        heapq.heapify(self._arriving)

    def speed(self, transfer: Transfer) -> float:
        """Bytes per second on the transfer's busiest link, now; 0 for one that is not on its links."""
        self._settle()
        return float(self._rows["speed"][self._rows["transfer"] == transfer].sum())

    def load(self) -> Floats:
        """Bytes per second on every link, now."""
        self._settle()
        flow = self._weight * self._rows["speed"][self._row]
        return np.bincount(self._link, flow, len(self.bytes_per_s)).astype(np.float64)

    # --- inside

    def _move(self, now_s: float) -> None:
        if not now_s >= self.now_s:
            raise ValueError(f"time cannot go from {self.now_s!r} to {now_s!r}")
        if now_s > self.now_s:  # many starts at one time are settled together
            self._leave_links(now_s)
            self.now_s = now_s

    def _leave_links(self, until_s: float) -> None:
        self._settle()
        while len(self._rows) and (end := float(self._rows["end"].min())) <= until_s:
            self.now_s = end
            ended = self._rows["end"] <= end
            for row in self._rows[ended]:
                self._arrive(int(row["order"]), row["transfer"])
            self._remove(ended)
            self._settle()

    def _arrive(self, order: int, transfer: Transfer) -> None:
        heapq.heappush(self._arriving, (self.now_s + transfer.route.latency_s, order, transfer))

    def _remove(self, rows: npt.NDArray[np.bool_]) -> None:
        gone = rows[self._row]
        links = self._link[gone]
        np.subtract.at(self._users, links, 1)
        self._uneven = self._uneven or bool(self._users[links].any())
        self._rows = self._rows[~rows]
        self._row = (np.cumsum(~rows) - 1)[self._row[~gone]]
        self._link, self._weight = self._link[~gone], self._weight[~gone]

    def _settle(self) -> None:
        """Take in what started at now_s, and share out the links if a link's users have changed."""
        if self._joining:
            self._join()
        if self._uneven:
            self._uneven = False
            speed = self._fair_speeds()
            changed = speed != self._rows["speed"]  # the others' ends stay as they are, to the last bit
            rows, speed = self._rows[changed], speed[changed]
            rows["left"] = np.maximum(rows["left"] - rows["speed"] * (self.now_s - rows["since"]), 0.0)
            rows["since"] = self.now_s
            rows["speed"] = speed
            rows["end"] = self.now_s + rows["left"] / speed
            self._rows[changed] = rows

    def _join(self) -> None:
        orders, transfers = zip(*self._joining, strict=True)
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
        self._joining = []

    def _fair_speeds(self) -> Floats:
        """Progressive filling. A link's level is the speed at which it would be full if all on it went on."""
        busy = self._users > 0
        row, link, weight = self._row, (np.cumsum(busy) - 1)[self._link], self._weight
        spare = self.bytes_per_s[busy]
        level = np.zeros(len(spare))
        speed = np.zeros(len(self._rows))
        while len(row):
            wanted = np.bincount(link, weight, len(spare))
            # levels only rise as others come to rest; the maximum keeps rounding from saying otherwise
            np.maximum(level, np.divide(spare, wanted, out=level.copy(), where=wanted > 0), out=level)
            entry_level = level[link]
            first = np.flatnonzero(np.diff(row, prepend=-1))
            lowest = np.repeat(np.minimum.reduceat(entry_level, first), np.diff(first, append=len(row)))
            # A level is certain if nothing on the link comes to rest below it. The lowest of all is; taking
            # all that are at once makes many rounds few.
            uncertain = np.zeros(len(spare), dtype=np.bool_)
            uncertain[link[entry_level > lowest]] = True
            certain = ~uncertain[link]
            speed[row[certain]] = entry_level[certain]
            rest = speed[row] > 0
            spare -= np.bincount(link[rest], weight[rest] * speed[row[rest]], len(spare))
            row, link, weight = row[~rest], link[~rest], weight[~rest]
        return speed
