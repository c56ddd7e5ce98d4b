"""GroupRule: SSP among workers of like speed. Who is in which group, and who may go on.

    a worker goes on while   its clock − (the slowest clock of its group) ≤ staleness,
                             counted from the last regrouping, or from the first step

Groups are fixed; or there is one at first, and whenever every worker has `window` new times, the medians say
whether the groups still fit (grouping.py). Times come as data in the pushes, so every shard of a server finds
the same groups by itself.

At a regrouping every group is told all that was pushed so far (grouped_server.py), so nobody lacks anything
of anybody's: clocks are counted from there on. Whoever changes groups therefore begins where its new group
begins, holds nobody up, and is not held up.

Shards regroup at slightly different moments. Could workers wait for each other in a circle, each at another
shard? Each would be ahead of the next by the bound. But such leads add up to the same at all times, for each
worker's steps count for it and against it; and when the last of these shards regrouped, its own lead was 0,
and none of the others was above the bound. So there is no such circle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from offbeat.server.messages import Push
from offbeat.server.rule import Clocks, Rule
from offbeat.strategies.gssp.clustering import Groups, recluster


@dataclass
class GroupClocks(Clocks):
    """Clocks, the groups that workers are in (0 is the fastest), and what their latest steps took."""

    group: dict[int, int] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)  # each worker's clock at the last regrouping
    spent: dict[int, deque[float]] = field(default_factory=dict)
    regroupings: int = 0

    def members(self, group: int) -> list[int]:
        return [worker for worker in self.of if self.group[worker] == group]

    def groups(self) -> Groups:
        """Those that have members."""
        return [sorted(self.members(group)) for group in sorted({self.group[worker] for worker in self.of})]

    def progress(self, worker: int) -> int:
        return self.of[worker] - self.since[worker]

    def start_of(self, group: int) -> tuple[int, int]:
        """A newcomer's clock, and its clock at the last regrouping: those of the slowest member."""
        slowest = min(self.members(group), key=self.progress, default=None)
        return (0, 0) if slowest is None else (self.of[slowest], self.since[slowest])

    def slowest_of(self, group: int) -> int:
        return min((self.progress(worker) for worker in self.members(group)), default=0)


@dataclass(frozen=True)
class GroupRule(Rule[GroupClocks]):
    staleness: int
    fixed: tuple[tuple[int, ...], ...]  # groups of workers; none: by measured speed
    likeness: float
    window: int

    def init(self) -> GroupClocks:
        return GroupClocks()

    def members(self, state: GroupClocks) -> list[int]:
        return list(state.of)

    def count(self, state: GroupClocks) -> int:
        """How many groups there are, with those that nobody is in at the moment."""
        return max(len(self.fixed), 1, *(group + 1 for group in state.group.values()))

    def join(self, state: GroupClocks, worker: int, clock: int | None) -> int:
        """One whose speed is not known sits among the slowest: there it holds up nobody who is fast."""
        if worker not in state.group:
            named = [group for group, members in enumerate(self.fixed) if worker in members]
            state.group[worker] = named[0] if named else self.count(state) - 1
        begin = state.slowest_of(state.group[worker])
        if clock is None:
            clock, state.since[worker] = state.start_of(state.group[worker])
        elif worker not in state.since:  # it was away when the others were grouped, or this server was
            state.since[worker] = clock - begin if state.regroupings else 0
        state.of[worker] = clock
        return clock

    def leave(self, state: GroupClocks, worker: int) -> None:
        state.of.pop(worker, None)
        state.spent.pop(worker, None)

    def advance(self, state: GroupClocks, push: Push) -> None:
        state.of[push.worker] = push.clock
        if not self.fixed:
            state.spent.setdefault(push.worker, deque(maxlen=self.window)).append(push.spent_s)
            if all(len(state.spent.get(worker, ())) == self.window for worker in state.of):
                self._look(state)

    def admits(self, state: GroupClocks, worker: int, clock: int) -> bool:
        return self._lead(state, worker, clock) <= self.staleness

    def staleness_of(self, state: GroupClocks, worker: int, clock: int | None) -> int:
        return 0 if clock is None else max(0, self._lead(state, worker, clock))

    def hint(self, state: GroupClocks, worker: int) -> int:
        """How fast its group is: 0 the fastest, 2 the slowest; 1 in between, or where there is one only."""
        last = self.count(state) - 1
        group = state.group.get(worker, last)  # who is away may look, too
        return 1 if not last or 0 < group < last else 2 * (group == last)

    def _lead(self, state: GroupClocks, worker: int, clock: int) -> int:
        """Since the regrouping, or in all steps if that is less: those who have done all of theirs wait, at
        the end of a run, for one that has some left, so that one must not wait for them.
        """
        group = state.group[worker]
        in_all = clock - min((state.of[member] for member in state.members(group)), default=0)
        return min(in_all, clock - state.since[worker] - state.slowest_of(group))

    def _look(self, state: GroupClocks) -> None:
        """Whether the groups still fit."""
        seconds = {worker: median(spent) for worker, spent in state.spent.items()}
        state.spent.clear()
        groups = recluster(state.groups(), seconds, self.likeness)
        if groups != state.groups():
            state.group = {worker: g for g, members in enumerate(groups) for worker in members}
            state.since = dict(state.of)
            state.regroupings += 1
