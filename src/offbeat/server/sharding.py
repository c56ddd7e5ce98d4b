"""Division of the flat weights among the shards of a server, and the state of one shard."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from offbeat.server.messages import Tensors


@dataclass
class ShardState:
    """State of a shard that outlives a crash: its weights, which pushes they contain, and the optimizer's."""

    weights: Tensors
    applied: dict[int, int] = field(default_factory=dict)  # the clock of each worker's latest push
    optimizer: list[Tensors] = field(default_factory=list)  # its state, part by part, if the server has it


def split_shards(flats: Tensors, shards: int) -> list[Tensors]:
    """Return, for each shard, its slice of every flat tensor: equal slices, in order."""
    slices = [flat.split(_slice_sizes(flat.numel(), shards)) for flat in flats]
    return [list(of_shard) for of_shard in zip(*slices, strict=True)] or [[] for _ in range(shards)]


@lru_cache(256)
def _slice_sizes(size: int, shards: int) -> list[int]:
    bounds = [shard_bounds([size], shard, shards)[0] for shard in range(shards)]
    return [high - low for low, high in bounds]


def shard_bounds(sizes: list[int], shard: int, shards: int) -> list[tuple[int, int]]:
    """Return where a shard's slice begins and ends in each of the flat tensors of these sizes."""
    return [(size * shard // shards, size * (shard + 1) // shards) for size in sizes]
