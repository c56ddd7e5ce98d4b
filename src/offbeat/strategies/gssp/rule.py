"""GroupRule: SSP among workers of similar speed: the group of each worker, and when it may continue.

    a worker continues while   its clock − (the slowest clock of its group) ≤ staleness,
                               counted from the last regrouping, or from the first step

Groups are fixed; or there is one at first, and whenever every worker has `window` new times, the medians
decide whether the groups still fit (clustering.py). Times are data in the pushes, so every shard of a server
finds the same groups by itself.

At a regrouping every group gets all pushes so far (aggregation.py), so no worker lacks another's pushes, and
clocks are counted from there. A worker that changes groups therefore begins where its new group begins,
delays no worker, and is not delayed.

Shards regroup at slightly different moments. Could workers wait for each other in a circle, each at another
shard? Each would be ahead of the next by the bound. But the sum of such leads never changes, for each
worker's steps count once for it and once against it; and when the last of these shards regrouped, its own
lead was 0, and none of the others was above the bound. So there is no such circle.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

from offbeat.server.messages import Push
from offbeat.server.rule import Clocks, ClockTable, Rule
from offbeat.strategies.gssp.clustering import Groups, recluster


@dataclass
class GroupClocks(Clocks):
    """Clocks, the group of each worker (0 is the fastest), and the seconds of its latest steps."""

    group: dict[int, int] = field(default_factory=dict)
    regrouped_at: dict[int, int] = field(default_factory=dict)  # each worker's clock at the last regrouping
    spent: dict[int, deque[float]] = field(default_factory=dict)
    measured: set[int] = field(default_factory=set)  # members that have all the seconds of a window
    regroupings: int = 0
    count: int = 1  # of groups, including those that have no member at the moment
    _clocks: dict[int, ClockTable] = field(default_factory=lambda: defaultdict(ClockTable))  # by group
    _progress: dict[int, ClockTable] = field(default_factory=lambda: defaultdict(ClockTable))

    def set(self, worker: int, clock: int) -> None:
        """Set the clock of a worker that has a group and a clock at the last regrouping."""
        group = self.group[worker]
        self.count = max(self.count, group + 1)
        self.of[worker] = self._clocks[group][worker] = clock
        self._progress[group][worker] = clock - self.regrouped_at[worker]

    def remove(self, worker: int) -> None:
        """Remove a member; its group stays known."""
        if self.of.pop(worker, None) is not None:
            del self._clocks[self.group[worker]][worker], self._progress[self.group[worker]][worker]
        self.spent.pop(worker, None)
        self.measured.discard(worker)

    def regroup(self, groups: Groups) -> None:
        """Make these groups of all members, and count progress from here."""
        self.group = {worker: g for g, members in enumerate(groups) for worker in members}
        self.regrouped_at = dict(self.of)
        self.regroupings += 1
        self.count = len(groups)
        self._clocks.clear()
        self._progress.clear()
        for worker, clock in self.of.items():
            self.set(worker, clock)

    def size(self, group: int) -> int:
        """Return the number of members of a group."""
        return len(self._clocks.get(group, ()))

    def members(self, group: int) -> list[int]:
        return list(self._clocks.get(group, ()))

    def groups(self) -> Groups:
        """Return the groups that have members."""
        return [sorted(self.members(group)) for group in sorted({self.group[worker] for worker in self.of})]

    def progress(self, worker: int) -> int:
        """Return the pushes of a worker since the last regrouping."""
        return self.of[worker] - self.regrouped_at[worker]

    def start_of(self, group: int) -> tuple[int, int]:
        """Return a new worker's clock, and its clock at the last regrouping: the slowest member's.

        Members that are new themselves count only if all of them are: see `Clocks.join`.
        """
        if not self.size(group):
            return 0, 0
        progress = self._progress[group]
        new = self.of.new
        known = [worker for worker in progress if worker not in new] or list(progress)
        slowest = min(known, key=progress.__getitem__)
        return self.of[slowest], self.regrouped_at[slowest]

    def slowest_of(self, group: int) -> int:
        """Return the least progress in a group; 0 if it has no member."""
        return self._progress[group].least if group in self._progress else 0

    def slowest_clock(self, group: int) -> int:
        """Return the least clock in a group; 0 if it has no member."""
        return self._clocks[group].least if group in self._clocks else 0


@dataclass(frozen=True)
class GroupRule(Rule[GroupClocks]):
    """Rule that admits a worker at most `staleness` clocks ahead of the slowest of its group."""

    staleness: int
    fixed: tuple[tuple[int, ...], ...]  # groups of workers; none: by measured speed
    max_ratio: float  # of step times in a group
    window: int

    def init(self) -> GroupClocks:
        return GroupClocks()

    def members(self, state: GroupClocks) -> list[int]:
        return list(state.of)

    def count(self, state: GroupClocks) -> int:
        """Return the number of groups, including those that have no member at the moment."""
        return max(len(self.fixed), state.count)

    def join(self, state: GroupClocks, worker: int, clock: int | None) -> int:
        """Add a worker; one of unknown speed joins the slowest group, where it delays no fast worker."""
        if worker not in state.group:
            named = [group for group, members in enumerate(self.fixed) if worker in members]
            state.group[worker] = named[0] if named else self.count(state) - 1
        begin, start = state.slowest_of(state.group[worker]), clock
        if start is None:
            start, state.regrouped_at[worker] = state.start_of(state.group[worker])
        elif worker not in state.regrouped_at:  # this worker, or this server, missed the last regrouping
            state.regrouped_at[worker] = start - begin if state.regroupings else 0
        state.set(worker, start)
        state.mark(worker, clock)
        return start

    def leave(self, state: GroupClocks, worker: int) -> None:
        state.remove(worker)

    def advance(self, state: GroupClocks, push: Push) -> None:
        state.set(push.worker, push.clock)
        if not self.fixed:
            spent = state.spent.setdefault(push.worker, deque(maxlen=self.window))
            spent.append(push.spent_s)
            if len(spent) == self.window:
                state.measured.add(push.worker)
            if len(state.measured) == len(state.of):
                self._regroup_if_needed(state)

    def admits(self, state: GroupClocks, worker: int, clock: int) -> bool:
        return self._lead(state, worker, clock) <= self.staleness

    def gate(self, state: GroupClocks) -> Hashable:
        groups = range(state.count)
        return state.regroupings, *[(state.slowest_of(g), state.slowest_clock(g)) for g in groups]

    def staleness_of(self, state: GroupClocks, worker: int, clock: int | None) -> int:
        return 0 if clock is None else max(0, self._lead(state, worker, clock))

    def hint(self, state: GroupClocks, worker: int) -> int:
        """Return the speed of the worker's group: 0 the fastest, 2 the slowest, 1 any other."""
        last = self.count(state) - 1
        group = state.group.get(worker, last)  # a worker that left may still evaluate
        return 1 if not last or 0 < group < last else 2 * (group == last)

    def _lead(self, state: GroupClocks, worker: int, clock: int) -> int:
        """Return by how many clocks a worker is ahead of the slowest of its group.

        Counted since the regrouping, or over all steps if that is less: at the end of a run, workers that
        have finished wait for one that has steps left, so that one must not wait for them.
        """
        group = state.group[worker]
        in_all = clock - state.slowest_clock(group)
        return min(in_all, clock - state.regrouped_at[worker] - state.slowest_of(group))

    def _regroup_if_needed(self, state: GroupClocks) -> None:
        """Make new groups, unless the groups still fit the measured seconds."""
        seconds = {worker: median(spent) for worker, spent in state.spent.items()}
        state.spent.clear()
        state.measured.clear()
        groups = recluster(state.groups(), seconds, self.max_ratio)
        if groups != state.groups():
            state.regroup(groups)
