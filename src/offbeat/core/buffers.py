"""Synchronization of a model's buffers, such as batch norm's running means.

Nothing trains buffers, so between synchronizations they drift apart. Three policies: `average` takes their
mean over the workers wherever a strategy synchronizes, `broadcast` takes worker 0's, `local` leaves each
worker its own. For evaluation and saving, `local` buffers are averaged too: the published model is one model.

Where workers do not move in step, some may have ended long ago (fast GPUs, equal work), and their buffers
belong to weights of that time. So the published mean is weighted, as running means forget (ours):

    worker i weighs 0.9^Δ_i;   Δ_i: whole steps of its own that fit between its last one and the last of all
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Op, Port, Reducer
from offbeat.errors import SettingError

POLICIES = ("average", "broadcast", "local")
KEPT = 0.9  # of a running mean at each step, by the usual momentum of batch norm


class CopiedBuffers(NamedTuple):
    """Copies of a model's buffers that have not been sent yet."""

    counters: list[Tensor]
    flats: list[Tensor]


class SentBuffers(NamedTuple):
    """Copies of a model's buffers that travel to the other workers."""

    counters: list[Pending[Tensor]]
    means: list[Pending[Tensor]]


class BufferSync:
    """The floating-point buffers of a model, exchanged as one flat tensor per dtype and device."""

    def __init__(self, model: nn.Module, policy: str) -> None:
        if policy not in POLICIES:
            raise SettingError(f"buffers={policy!r}: choose one of {', '.join(POLICIES)}")
        self.policy = policy
        self._groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._counters: list[Tensor] = []  # such as num_batches_tracked: a mean of counts means nothing
        for buffer in model.buffers():
            if not buffer.is_floating_point():
                self._counters.append(buffer)
            elif buffer.numel():
                self._groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self._in_flight: list[Pending[Tensor]] = []
        self._weighed_at = -1  # the step after which the published mean was last weighted
        self._fraction: float | None = None

    def start(self, port: Port, reducer: Reducer | None = None) -> None:
        """Start to exchange the buffers as the policy says; `reducer` averages them instead of the port."""
        if self._groups:
            self._in_flight = self.send(port, reducer=reducer)

    async def finish(self) -> None:
        """Wait for the exchange that `start` began, and write its result into the buffers."""
        if self._in_flight:
            sent, self._in_flight = self._in_flight, []
            await self.receive(sent)

    def send(
        self, port: Port, lane: Lane = Lane.FRONT, reducer: Reducer | None = None
    ) -> list[Pending[Tensor]]:
        """Start an exchange and return its pending results, for strategies that finish it in a later step."""
        return self._send(port, lane, reducer) if self.policy != "local" else []

    def _send(
        self, port: Port, lane: Lane = Lane.FRONT, reducer: Reducer | None = None
    ) -> list[Pending[Tensor]]:
        return self._exchange(self._flattened(), port, lane, reducer)

    def _flattened(self) -> list[Tensor]:
        return [torch.cat([b.flatten() for b in group]) for group in self._groups.values()]

    def _exchange(
        self, flats: list[Tensor], port: Port, lane: Lane = Lane.FRONT, reducer: Reducer | None = None
    ) -> list[Pending[Tensor]]:
        if self.policy == "broadcast":
            return [port.broadcast(flat, lane=lane) for flat in flats]
        return [(reducer or port).all_reduce(flat, Op.MEAN, lane) for flat in flats]

    async def receive(self, sent: list[Pending[Tensor]]) -> None:
        """Wait for an exchange that `send` began, and write its result into the buffers."""
        for pending, group in zip(sent, self._groups.values(), strict=bool(sent)):
            flat = await pending
            for buffer, part in zip(group, flat.split([b.numel() for b in group]), strict=True):
                buffer.copy_(part.view_as(buffer))

    async def sync_all(self, port: Port, fraction: float | None = None) -> None:
        """Give all workers the same buffers, whatever the policy; `fraction` as for `send_copies`."""
        values = await self.published(self.send_copies(port, fraction=fraction))
        for buffer, value in zip(self.all(), values, strict=True):
            buffer.copy_(value)

    def copy(self) -> CopiedBuffers:
        """Copy all buffers, to send them later."""
        return CopiedBuffers([counter.clone() for counter in self._counters], self._flattened())

    def send_copies(
        self, port: Port, copied: CopiedBuffers | None = None, fraction: float | None = None
    ) -> SentBuffers:
        """Start to exchange copies of all buffers, whatever the policy, for `published`.

        `fraction` is this worker's weight in a weighted mean; the fractions of all workers add up to 1.
        """
        copied = copied or self.copy()
        counters = [port.broadcast(counter) for counter in copied.counters]
        if fraction is None or self.policy == "broadcast":
            return SentBuffers(counters, self._exchange(copied.flats, port))
        weighted = [flat.mul_(fraction) for flat in copied.flats]
        return SentBuffers(counters, [port.all_reduce(flat, Op.SUM) for flat in weighted])

    async def published(self, sent: SentBuffers) -> list[Tensor]:
        """Wait for copies that `send_copies` sent; return the buffers that all workers publish, as `all`."""
        values = [await pending for pending in sent.counters]
        for pending, group in zip(sent.means, self._groups.values(), strict=True):
            parts = (await pending).split([b.numel() for b in group])
            values += [part.view_as(buffer) for buffer, part in zip(group, parts, strict=True)]
        return values

    def all(self) -> list[Tensor]:
        """Return all buffers."""
        return [*self._counters, *(b for group in self._groups.values() for b in group)]

    async def fraction(self, port: Port, ledger: Ledger) -> float | None:
        """Agree on this worker's weight in the published mean, where workers do not move in step.

        Return None where all weigh the same. As long as no worker steps, the weights stay what they are.
        """
        if not self._groups or port.world == 1:
            return None
        device = next(iter(self._groups))[1]

        def number(value: float) -> Tensor:
            return torch.tensor([value], dtype=torch.float64, device=device)

        stepped = float(ledger.steps != self._weighed_at)
        if (await port.all_reduce(number(stepped), Op.MAX)).item():
            idle_s = ledger.idle_s
            least_s = -(await port.all_reduce(number(-idle_s), Op.MAX)).item()
            missed = (idle_s - least_s) // ledger.usual_step_s if ledger.usual_step_s > 0 else 0.0
            total = (await port.all_reduce(number(KEPT**missed), Op.SUM)).item()
            self._fraction = None if total == port.world else KEPT**missed / total
            self._weighed_at = ledger.steps
        return self._fraction
