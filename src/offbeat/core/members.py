"""Members: the ranks that train one replica together, below the level at which a strategy works.

Usually a worker is one rank, and its replica the whole model. With `attach(group=…)` a worker may be several
ranks: each holds a part of every parameter (a sharded model), or a copy of the whole model (`inner=…`). Each
rank then exchanges its part with the ranks that hold the same part in other replicas, and strategies see a
rank's part as if it were a model.

Three numbers must not be a single rank's: those of the whole gradient, those of all data that the replica has
seen, and those that ranks measure. `Members` reduces them over the ranks of the replica.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Op, Port


class Members:
    """The ranks of one replica. By default there is one, and every reduction is what it was given."""

    def __init__(
        self,
        port: Port | None = None,
        sharded: bool = False,
        device: torch.device | None = None,
        global_rank: int | None = None,
    ) -> None:
        self.port = port  # to the other members
        self.device = device
        self._global_rank = global_rank
        self.sharded = sharded  # each member has a part of every parameter, not a copy

    @property
    def count(self) -> int:
        """The number of ranks that train this replica."""
        return 1 if self.port is None else self.port.world

    def global_rank(self, rank: int) -> int:
        """Return this rank's number among all ranks of the job; `rank` is its number in its group."""
        return rank if self._global_rank is None else self._global_rank

    def whole(self, partial: Tensor) -> Pending[Tensor]:
        """Add up sums over parts of the model, in place. A copy of the whole model has the sum already."""
        return self._reduce(partial, Op.SUM) if self.sharded else Arrived(partial)

    def total(self, values: Tensor) -> Pending[Tensor]:
        """Add up, in place, what each member has counted by itself, such as samples."""
        return self._reduce(values, Op.SUM)

    def agree(self, values: Tensor) -> Pending[Tensor]:
        """Replace values that members may see differently, such as seconds, by their maximum, in place."""
        return self._reduce(values, Op.MAX)

    async def agree_on(self, *numbers: float) -> list[float]:
        """Return the maximum of each number over the members."""
        if self.port is None:
            return list(numbers)
        agreed: list[float] = (await self.agree(self.vector(*numbers))).tolist()
        return agreed

    def vector(self, *numbers: float) -> Tensor:
        """Return the numbers as a tensor that the members can reduce."""
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def _reduce(self, values: Tensor, op: Op) -> Pending[Tensor]:
        return Arrived(values) if self.port is None else self.port.all_reduce(values, op)


ALONE = Members()


class Part(NamedTuple):
    """A rank's part of a sharded parameter, as an attribute `part` of the rank's local parameter."""

    room: int  # elements of the largest part: every member reserves as many, so all have the same layout
    members_numel: int  # elements that all members hold together; copies count each time
    fraction: float  # of this rank's elements in sums over the model: 1, or less where others have a copy


def part_of(param: nn.Parameter) -> Part:
    """Return the rank's part of a parameter; of a parameter that is not sharded, all of it."""
    part: Part | None = getattr(param, "part", None)
    return part or Part(param.numel(), param.numel(), 1.0)
