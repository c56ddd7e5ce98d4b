"""Statistics: the buffers that a model keeps beside its weights, such as batch norm's running means.

Nothing trains them, so between synchronizations they drift apart. Three policies:
`average` takes their mean over the workers wherever a strategy synchronizes, `broadcast` takes worker 0's,
`local` leaves each worker its own. In a consensus `local` ones are averaged too: there is one model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Op, Port, Reducer
from offbeat.errors import SettingError

POLICIES = ("average", "broadcast", "local")


class BufferSync:
    """The floating-point buffers of a model, exchanged as one flat tensor for each dtype and device."""

    def __init__(self, model: nn.Module, policy: str) -> None:
        if policy not in POLICIES:
            raise SettingError(f"buffers={policy!r}: choose one of {', '.join(POLICIES)}")
        self.policy = policy
        self._kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._counters: list[Tensor] = []  # such as num_batches_tracked: a mean of counts means nothing
        for buffer in model.buffers():
            if not buffer.is_floating_point():
                self._counters.append(buffer)
            elif buffer.numel():
                self._kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self._flying: list[Pending[Tensor]] = []

    def start(self, port: Port, reducer: Reducer | None = None) -> None:
        """Send this worker's statistics on their way, by the policy."""
        if self._kinds:
            self._flying = self.send(port, reducer=reducer)

    async def finish(self) -> None:
        """Take in what `start` sent for."""
        if self._flying:
            flying, self._flying = self._flying, []
            await self.receive(flying)

    def send(
        self, port: Port, lane: Lane = Lane.FRONT, reducer: Reducer | None = None
    ) -> list[Pending[Tensor]]:
        """As `start`, for strategies that hold what is under way for longer than a step."""
        return self._send(port, lane, reducer) if self.policy != "local" else []

    def _send(
        self, port: Port, lane: Lane = Lane.FRONT, reducer: Reducer | None = None
    ) -> list[Pending[Tensor]]:
        flats = [torch.cat([b.flatten() for b in kind]) for kind in self._kinds.values()]
        if self.policy == "broadcast":
            return [port.broadcast(flat, lane=lane) for flat in flats]
        return [(reducer or port).all_reduce(flat, Op.MEAN, lane) for flat in flats]

    async def receive(self, sent: list[Pending[Tensor]]) -> None:
        """What `send` sent has become the statistics of all."""
        for pending, kind in zip(sent, self._kinds.values(), strict=bool(sent)):
            flat = await pending
            for buffer, part in zip(kind, flat.split([b.numel() for b in kind]), strict=True):
                buffer.copy_(part.view_as(buffer))

    async def sync_all(self, port: Port) -> None:
        """One model for all: whatever the policy, the same buffers everywhere."""
        await self.receive(self._send(port))
        for pending in [port.broadcast(counter) for counter in self._counters]:
            await pending

    def all(self) -> list[Tensor]:
        return [*self._counters, *(b for kind in self._kinds.values() for b in kind)]
