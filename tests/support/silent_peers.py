"""A port of one of several workers, where the others have nothing to say."""

from __future__ import annotations

from torch import Tensor

from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Op


class Alone:
    """The port of one of several workers, where the others have nothing to say."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.elastic = False
        self.world = world
        self.lanes: list[Lane] = []

    def reduce_scatter(self, shares: list[Tensor], op: Op, lane: Lane) -> Pending[Tensor]:
        assert op is Op.MEAN
        self.lanes.append(lane)
        return Arrived(shares[self.rank])

    def all_gather(self, shares: list[Tensor], lane: Lane) -> Pending[list[Tensor]]:
        self.lanes.append(lane)
        return Arrived(shares)
