"""Synchronization of a model's buffers, such as batch norm's running means.

Nothing trains buffers, so between synchronizations they drift apart. Three policies: `average` takes their
mean over the workers wherever a strategy synchronizes, `broadcast` takes worker 0's, `local` leaves each
worker its own. For evaluation and saving, `local` buffers are averaged too: the published model is one model.

A module may assign a buffer anew (`self.mean = 0.9 * self.mean + …`), so buffers are known by their places.

Where workers do not move in step, some may have ended long ago (fast GPUs, equal work), and their buffers
belong to weights of that time. So the published mean is weighted, as running means forget (ours):

    worker i weighs 0.9^max(0, Δ_i − 10);   Δ_i = (max_j v_j − v_i) / N

v_i: pushes that the server had received when worker i last read its weights, so Δ_i counts what an average
worker has pushed since. No clock of time has a part in it: who comes some steps late weighs as much as all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Op, Port, Reducer
from offbeat.errors import OffbeatError, SettingError

POLICIES = ("average", "broadcast", "local")
KEPT = 0.9  # of a running mean at each step, by the usual momentum of batch norm
TOLERATED = 10  # pushes of an average worker, after which statistics begin to be forgotten


class CopiedBuffers(NamedTuple):
    """Copies of a model's buffers that have not been sent yet."""

    counters: list[Tensor]
    flats: list[Tensor]


class SentBuffers(NamedTuple):
    """Copies of a model's buffers that travel to the other workers."""

    counters: list[Pending[Tensor]]
    means: list[Pending[Tensor]]


class Place:
    """A buffer's place in its module."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name = name
        self._module, self._key = module, key
        self._last: Any = module._buffers[key]

    @property
    def tensor(self) -> Tensor:
        """The buffer that is there now; if that has another shape or kind, the last one that had not."""
        now = self._module._buffers.get(self._key)
        if now is not self._last and now is not None and _kind(now) == _kind(self._last):
            self._last = now
        return self._last  # type: ignore[no-any-return]

    @property
    def is_saved(self) -> bool:
        """True if the buffer belongs to the model's `state_dict()`."""
        return self._key not in self._module._non_persistent_buffers_set

    def check(self) -> None:
        """Raise an error if the module has a buffer of another shape or kind here, and saves it.

        One that it does not save, such as a cache of positions, is a worker's own.
        """
        if self.is_saved and self._module._buffers.get(self._key) is not self.tensor:
            raise OffbeatError(
                f"buffer {self.name} has another shape, dtype or device than when the strategy was attached, "
                "so the ranks' buffers cannot be made one: close() and attach again, or register it with "
                "persistent=False"
            )


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def has_mean(tensor: Tensor) -> bool:
    """Return whether tensors of this kind can be averaged: floats can, but not those of a single byte."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def places_of(model: nn.Module) -> Iterator[Place]:
    """Yield the place of each buffer of a model; a buffer that has several places, once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield Place(f"{prefix}.{key}" if prefix else key, module, key)


class BufferSync:
    """The floating-point buffers of a model, exchanged as one flat tensor per dtype and device."""

    def __init__(self, model: nn.Module, policy: str) -> None:
        if policy not in POLICIES:
            raise SettingError(f"buffers={policy!r}: choose one of {', '.join(POLICIES)}")
        self.policy = policy
        self._groups: dict[tuple[torch.dtype, torch.device], list[Place]] = {}
        self._counters: list[Place] = []  # such as num_batches_tracked: a mean of counts means nothing
        for place in places_of(model):
            buffer = place.tensor
            if not has_mean(buffer):
                self._counters.append(place)
            elif buffer.numel():
                self._groups.setdefault((buffer.dtype, buffer.device), []).append(place)
        self._in_flight: list[Pending[Tensor]] = []

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
        groups = ([place.tensor for place in group] for group in self._groups.values())
        return [torch.cat([buffer.detach().flatten() for buffer in group]) for group in groups]

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
            buffers = [place.tensor for place in group]
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))

    async def sync_all(self, port: Port, fraction: float | None = None) -> None:
        """Give all workers the same buffers, whatever the policy; `fraction` as for `send_copies`."""
        values = await self.published(self.send_copies(port, fraction=fraction))
        for buffer, value in zip(self.all(), values, strict=True):
            buffer.copy_(value)

    def copy(self) -> CopiedBuffers:
        """Copy all buffers, to send them later."""
        for place in self._places():
            place.check()
        return CopiedBuffers([place.tensor.clone() for place in self._counters], self._flattened())

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
            buffers = [place.tensor for place in group]
            parts = (await pending).split([b.numel() for b in buffers])
            values += [part.view_as(buffer) for buffer, part in zip(buffers, parts, strict=True)]
        return values

    def all(self) -> list[Tensor]:
        """Return all buffers."""
        return [place.tensor for place in self._places()]

    def _places(self) -> list[Place]:
        return [*self._counters, *(place for group in self._groups.values() for place in group)]

    async def fraction(self, port: Port, ledger: Ledger) -> float | None:
        """Agree on this worker's weight in the published mean, where workers do not move in step.

        Return None where all weigh the same.
        """
        if not self._groups or port.world == 1:
            return None
        device = next(iter(self._groups))[1]

        def number(value: float) -> Tensor:
            return torch.tensor([value], dtype=torch.float64, device=device)

        seen = ledger.pushes_seen
        most = (await port.all_reduce(number(seen), Op.MAX)).item()
        weight = KEPT ** max(0.0, (most - seen) / port.world - TOLERATED)
        total = (await port.all_reduce(number(weight), Op.SUM)).item()
        return None if total == port.world else weight / total
