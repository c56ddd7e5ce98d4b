"""Throughput meter: how fast the workers compute and send, as numbers that all workers share."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.members import ALONE, Members
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Op, Reducer, Usage

EVERY = 8  # steps from one exchange of measurements to the next
SMOOTHING = 0.5  # the weight of a new measurement


@dataclass
class ThroughputMeter:
    """The measured speed of computing and sending; a part of OSP's state.

    compute_s     seconds of computing per step, of the slowest worker: the median of its last steps, since a
                  loop may pause between two steps
    bytes_per_s   bytes sent per second of sending, of the fastest worker: the last one to join an operation
                  does not wait in it for the others
    """

    compute_s: float = 0.0
    bytes_per_s: float = 0.0
    steps: int = 0
    computed_s: float = 0.0  # in total, until the last step
    step_times: list[float] = field(default_factory=list)  # of computing, since the last exchange, in seconds
    before: list[float] = field(default_factory=list)  # seconds and bytes of sending until the last exchange
    pending: list[Pending[Tensor]] = field(default_factory=list)

    async def read(
        self, reducer: Reducer, usage: Usage, importance: Tensor, members: Members = ALONE
    ) -> list[float] | None:
        """Exchange measurements with all workers every few steps, in the background; use them a step later.

        `importance` is exchanged too. In the step in which it is used, return its maximum over all workers,
        since numbers that workers compute alike may differ by a bit on different machines; else return None.
        The members of a replica first agree on theirs.
        """
        agreed = None
        step_s, self.computed_s = usage.compute_s - self.computed_s, usage.compute_s
        if self.steps and step_s >= 0:  # after a restart the port counts from 0
            self.step_times.append(step_s)
        if self.pending:
            compute_s, bytes_per_s, *agreed = (await self.pending.pop()).tolist()
            if compute_s > 0:
                weight = SMOOTHING if self.compute_s else 1.0
                self.compute_s += weight * (compute_s - self.compute_s)
                self.bytes_per_s += weight * (bytes_per_s - self.bytes_per_s)
        if self.steps % EVERY == 1:
            measured = await members.agree(importance.new_tensor(self._since_last(usage)))
            if members.sharded:
                importance = await members.whole(importance.clone())
            numbers = torch.cat([measured, importance])
            self.pending.append(reducer.all_reduce(numbers, Op.MAX, Lane.BACK))
        self.steps += 1
        return agreed

    def _since_last(self, usage: Usage) -> list[float]:
        """Return seconds per step and bytes per second; zeros at first, and after a restart."""
        now, before = [usage.communicate_s, float(usage.nbytes)], self.before
        times, self.step_times, self.before = self.step_times, [], now
        if not before or not times or any(n < b for n, b in zip(now, before, strict=True)):
            return [0.0, 0.0]
        communicate_s, nbytes = (n - b for n, b in zip(now, before, strict=True))
        return [statistics.median(times), nbytes / max(communicate_s, 1e-9)]
