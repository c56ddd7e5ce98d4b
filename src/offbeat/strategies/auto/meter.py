"""Meter: seconds of computing, waiting and exchanging per step, as all workers agree on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Op, Port, Usage
from offbeat.core.replica import Replica
from offbeat.strategies.auto.model import WindowSeconds


@dataclass
class Meter:
    """The measurements of one worker since the window began, and the exchange of the last window's.

    The exchange takes the time of a step, in the background. The slowest worker computes longest, and waits
    for nobody but the network; a worker that comes last to an exchange sees how long it takes by itself. So
    the largest C is taken, and the smallest w and K: K of a worker's fastest exchange.
    """

    steps: int = 0  # measured in this window
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = math.inf  # of the fastest exchange
    pending: list[Pending[Tensor]] = field(default_factory=list)  # at most one: the last window's
    last: list[Usage] = field(default_factory=list, metadata={"saved": False})  # after the last step

    def add(self, usage: Usage, exchanged: bool) -> None:
        """Measure the step that has just ended; `exchanged`: with an exchange of the model."""
        for before in self.last:  # none at first, and after a restart: the port counts from 0
            self.steps += 1
            self.compute_s += usage.compute_s - before.compute_s
            self.wait_s += usage.wait_s - before.wait_s
            if exchanged:
                self.exchange_s = min(self.exchange_s, usage.communicate_s - before.communicate_s)
        self.last = [usage]

    async def send(self, port: Port, replica: Replica, fit: bool) -> None:
        """Start to exchange the window's numbers, and begin a new window; `fit`: the worker may leave BSP."""
        known = [math.inf, 0.0, 0.0, 0.0, 0.0]  # of a worker that has measured nothing
        if self.steps and self.exchange_s < math.inf:
            compute_s, wait_s = self.compute_s / self.steps, self.wait_s / self.steps
            known = [compute_s, -compute_s, -wait_s, -self.exchange_s, -float(fit)]
        numbers = await replica.members.agree_on(*known)
        vector = replica.weights[0].new_tensor(numbers, dtype=torch.float64)
        self.pending.append(port.all_reduce(vector, Op.MAX, Lane.BACK))
        self.restart()

    async def receive(self) -> WindowSeconds | None:
        """Return what all workers have measured; None if nothing was sent."""
        if not self.pending:
            return None
        compute_s, fastest_s, wait_s, exchange_s, fit = (await self.pending.pop()).tolist()
        return WindowSeconds(compute_s, -fastest_s, -wait_s, -exchange_s, fit < 0)

    async def drain(self) -> None:
        """Wait for the exchange in flight; the next step reads the result."""
        self.pending = [Arrived(await pending) for pending in self.pending]

    def restart(self) -> None:
        """Begin a new window."""
        self.steps, self.compute_s, self.wait_s, self.exchange_s = 0, 0.0, 0.0, math.inf
