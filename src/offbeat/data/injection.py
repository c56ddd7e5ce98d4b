"""Data injection: workers lend some of their samples to each other (Tyagi & Swany, 2023, for non-IID data).

    each step:    αN of the N workers, drawn at random, give βb' samples of their batch to all others
    local batch:  b' = b / (1 + αβN), so that a worker trains on b samples, its own and those it receives

    injection = offbeat.DataInjection(sync, alpha=0.5, beta=0.5)
    loader = DataLoader(…, batch_size=injection.local_batch_size(32), drop_last=True)
    for batch in loader:
        batch = injection(batch)

The donors are drawn from the seed and the step, the same on all workers. The samples travel through the port
and their bytes are counted in the ledger, but a step without other communication still counts as local.
Ours: a donor does not receive its own samples again, so it trains on fewer samples than the others.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from offbeat.core.fields import Number, Whole, read_inside
from offbeat.core.pending import Pending, block_on
from offbeat.core.port import CollectivePort
from offbeat.errors import SettingError

B = TypeVar("B")

FRACTION = Number(noun="a fraction", at_least=0, at_most=1)


class Attached(Protocol):
    """An object with a port: the `sync` of a user's loop, or a worker of the built-in loop."""

    @property
    def port(self) -> CollectivePort: ...


class DataInjection:
    """Mixer of other workers' samples into a batch: a tensor, or tensors in a tuple, list or dict.

    All workers call it equally often, with batches of one size. `step` counts the calls: set it to resume.
    """

    def __init__(self, attached: Attached, alpha: float, beta: float, seed: int = 0) -> None:
        read_inside("alpha", FRACTION, alpha)
        read_inside("beta", FRACTION, beta)
        read_inside("seed", Whole(), seed)
        self.alpha = alpha
        self.beta = beta
        self.seed = seed
        self.step = 0
        self._port = attached.port
        self._size: int | None = None

    def local_batch_size(self, batch_size: int) -> int:
        """Return how many samples to draw, so that with the received samples they are `batch_size`."""
        world = self._port.world
        return max(1, round(batch_size / (1 + self.alpha * self.beta * world))) if world > 1 else batch_size

    def donors(self, step: int) -> list[int]:
        """Draw the workers that give samples in a step."""
        world = self._port.world
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % (1 << 63))
        return sorted(torch.randperm(world, generator=generator)[: round(self.alpha * world)].tolist())

    def __call__(self, batch: B) -> B:
        """Mix samples of this step's donors into `batch`."""
        return block_on(self.mix(batch))

    async def mix(self, batch: B) -> B:
        """Mix samples of this step's donors into `batch`, as a coroutine."""
        fields = _fields(batch)
        size = len(fields[0])
        if self._size not in (None, size):
            raise SettingError(
                f"a batch of {size} after one of {self._size}: build the loader with drop_last=True"
            )
        self._size = size
        donors, donated = self.donors(self.step), round(self.beta * size)
        self.step += 1
        if not donated or self._port.world == 1:
            return batch
        mixed = [field.new_empty((size + donated * len(donors), *field.shape[1:])) for field in fields]
        pending: list[Pending[Tensor]] = []
        end = size
        with self._port.ledger.uncounted_sync():
            for donor in donors:
                own = donor == self._port.rank
                for field, rows in zip(fields, mixed, strict=True):
                    part = field[:donated].contiguous() if own else rows[end : end + donated]
                    as_bytes = part.view(torch.uint8)  # not every backend can send every dtype
                    pending.append(self._port.broadcast(as_bytes, donor))
                end += 0 if own else donated
        for field, rows in zip(fields, mixed, strict=True):
            rows[:size] = field
        for broadcast in pending:
            await broadcast
        return _like(batch, [rows[:end] for rows in mixed])


def _fields(batch: object) -> list[Tensor]:
    """Return the tensors of a batch, which all have one sample per row."""
    parts = [batch] if isinstance(batch, Tensor) else None
    if isinstance(batch, tuple | list):
        parts = list(batch)
    elif isinstance(batch, dict):
        parts = list(batch.values())
    if not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts):
        raise SettingError(
            "a batch must be a tensor, or a tuple, list or dict of tensors, one sample per row"
        )
    if len({len(part) for part in parts}) != 1:
        raise SettingError("the tensors of a batch must have equally many rows, one per sample")
    return parts


def _like(batch: B, fields: list[Tensor]) -> B:
    """Build a batch of the same type as `batch` from other tensors."""
    if isinstance(batch, Tensor):
        made: object = fields[0]
    elif isinstance(batch, dict):
        made = dict(zip(batch, fields, strict=True))
    elif hasattr(batch, "_make"):  # a named tuple
        made = batch._make(fields)
    else:
        made = type(batch)(fields)  # type: ignore[call-arg]
    return made  # type: ignore[return-value]
