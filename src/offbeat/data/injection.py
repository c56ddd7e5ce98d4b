"""Data injection: workers lend each other some of their samples (Tyagi & Swany, 2023, for non-IID data).

    each step:    αN of the N workers, drawn at random, give βb' samples of their batch to all others
    local batch:  b' = b / (1 + αβN), so that a worker trains on b samples, its own and those it was given

    injection = offbeat.DataInjection(sync, alpha=0.5, beta=0.5)
    loader = DataLoader(…, batch_size=injection.local_batch_size(32), drop_last=True)
    for batch in loader:
        batch = injection(batch)

Who gives is drawn from the seed and the step, the same on all workers. The samples travel through the port
and are counted in the ledger, but a step in which nothing else travelled stays a local one. Ours: a giver
does not get its own samples a second time, so it trains on fewer than the others, by what it gave.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Pending, block_on
from offbeat.core.port import Port
from offbeat.errors import SettingError

B = TypeVar("B")


class CountedPort(Port, Protocol):
    """A port whose books are open."""

    @property
    def ledger(self) -> Ledger: ...


class Attached(Protocol):
    """What has a port: the `sync` of a user's loop, or a worker of the built-in one."""

    @property
    def port(self) -> CountedPort: ...


class DataInjection:
    """Each call mixes samples of other workers into a batch: a tensor, or tensors in a tuple, list or dict.

    All workers call it equally often, with batches of one size. `step` counts the calls; set it on resuming.
    """

    def __init__(self, attached: Attached, alpha: float, beta: float, seed: int = 0) -> None:
        check_slices(alpha, beta)
        self.alpha = alpha
        self.beta = beta
        self.seed = seed
        self.step = 0
        self._port = attached.port
        self._size: int | None = None

    def local_batch_size(self, batch_size: int) -> int:
        """How many samples to draw, so that with those of the others it makes `batch_size`."""
        world = self._port.world
        return max(1, round(batch_size / (1 + self.alpha * self.beta * world))) if world > 1 else batch_size

    def givers(self, step: int) -> list[int]:
        """The workers that give in a step."""
        world = self._port.world
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % (1 << 63))
        return sorted(torch.randperm(world, generator=generator)[: round(self.alpha * world)].tolist())

    def __call__(self, batch: B) -> B:
        return block_on(self.mix(batch))

    async def mix(self, batch: B) -> B:
        fields = _fields(batch)
        size = len(fields[0])
        if self._size not in (None, size):
            raise SettingError(f"a batch of {size} after one of {self._size}: give the loader drop_last=True")
        self._size = size
        givers, given = self.givers(self.step), round(self.beta * size)
        self.step += 1
        if not given or self._port.world == 1:
            return batch
        mixed = [field.new_empty((size + given * len(givers), *field.shape[1:])) for field in fields]
        flying: list[Pending[Tensor]] = []
        end = size
        with self._port.ledger.uncounted_sync():
            for giver in givers:
                mine = giver == self._port.rank
                for field, room in zip(fields, mixed, strict=True):
                    part = field[:given].contiguous() if mine else room[end : end + given]
                    as_bytes = part.view(torch.uint8)  # not every backend can send every dtype
                    flying.append(self._port.broadcast(as_bytes, giver))
                end += 0 if mine else given
        for field, room in zip(fields, mixed, strict=True):
            room[:size] = field
        for pending in flying:
            await pending
        return _like(batch, [room[:end] for room in mixed])


def check_slices(alpha: float, beta: float) -> None:
    for name, share in (("alpha", alpha), ("beta", beta)):
        if not 0 <= share <= 1:
            raise SettingError(f"{name}={share!r}: a share, from 0 to 1")


def _fields(batch: object) -> list[Tensor]:
    """The tensors of a batch, which all have a sample a row."""
    parts = [batch] if isinstance(batch, Tensor) else None
    if isinstance(batch, tuple | list):
        parts = list(batch)
    elif isinstance(batch, dict):
        parts = list(batch.values())
    if not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts):
        raise SettingError("a batch must be a tensor, or a tuple, list or dict of tensors, a sample a row")
    if len({len(part) for part in parts}) != 1:
        raise SettingError("the tensors of a batch must have equally many rows, a sample each")
    return parts


def _like(batch: B, fields: list[Tensor]) -> B:
    """The same kind of thing with other tensors in it."""
    if isinstance(batch, Tensor):
        made: object = fields[0]
    elif isinstance(batch, dict):
        made = dict(zip(batch, fields, strict=True))
    elif hasattr(batch, "_make"):  # a named tuple
        made = batch._make(fields)
    else:
        made = type(batch)(fields)  # type: ignore[call-arg]
    return made  # type: ignore[return-value]
