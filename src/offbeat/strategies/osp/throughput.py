"""Meter: how fast the workers compute and send, as numbers that all of them know alike."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Op, Reducer, Usage

EVERY = 8  # steps
SMOOTHING = 0.5  # how much of the difference to the last measurement is made up by a new one


@dataclass
class ThroughputMeter:
    """A part of a strategy's state, read at every step, at a moment when nothing of it is under way.

    compute_s     seconds of computing a step, of the slowest worker: the median of its last steps, since a
                  loop may pause between two of them
    bytes_per_s   bytes sent by seconds of sending, of the worker that saw most of them: who comes last to an
                  operation does not wait in it for the others
    """

    compute_s: float = 0.0
    bytes_per_s: float = 0.0
    steps: int = 0
    computed_s: float = 0.0  # until the last step
    paces: list[float] = field(default_factory=list)  # seconds of computing, of the steps since asked
    before: list[float] = field(default_factory=list)
    coming: list[Pending[Tensor]] = field(default_factory=list)

    async def read(self, reducer: Reducer, usage: Usage, opinion: Tensor) -> list[float] | None:
        """Ask all workers, every few steps and in the background; a step later, take in the answer.

        `opinion` is what else this worker has to say. The value is the maximum of that over all workers, when
        it has come: numbers that workers compute alike may yet differ in a bit, on unlike machines.
        """
        answer = None
        pace_s, self.computed_s = usage.compute_s - self.computed_s, usage.compute_s
        if self.steps and pace_s >= 0:  # after a restart all counts anew
            self.paces.append(pace_s)
        if self.coming:
            compute_s, bytes_per_s, *answer = (await self.coming.pop()).tolist()
            if compute_s > 0:
                belief = SMOOTHING if self.compute_s else 1.0
                self.compute_s += belief * (compute_s - self.compute_s)
                self.bytes_per_s += belief * (bytes_per_s - self.bytes_per_s)
        if self.steps % EVERY == 1:
            numbers = torch.cat([opinion.new_tensor(self._since_last(usage)), opinion])
            self.coming.append(reducer.all_reduce(numbers, Op.MAX, Lane.BACK))
        self.steps += 1
        return answer

    def _since_last(self, spent: Usage) -> list[float]:
        """Seconds a step and bytes a second; zeros at first, and after a restart, which counts anew."""
        now, before = [spent.communicate_s, float(spent.nbytes)], self.before
        paces, self.paces, self.before = self.paces, [], now
        if not before or not paces or any(n < b for n, b in zip(now, before, strict=True)):
            return [0.0, 0.0]
        communicate_s, nbytes = (n - b for n, b in zip(now, before, strict=True))
        return [statistics.median(paces), nbytes / max(communicate_s, 1e-9)]
