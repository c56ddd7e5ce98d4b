"""Division of the flat weights among the shards of a server, and the state of one shard."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.server.messages import Tensors


@dataclass
class ShardState:
    """State of a shard that outlives a crash: its weights, which pushes they contain, and the optimizer's."""

    weights: Tensors
    applied: dict[int, int] = field(default_factory=dict)  # the clock of each worker's latest push
    optimizer: list[Tensors] = field(default_factory=list)  # its state, part by part, if the server has it


def split_shards(flats: Tensors, shards: int) -> list[Tensors]:
    """Return, for each shard, its slice of every flat tensor: equal slices, in order."""
    sizes = [flat.numel() for flat in flats]
    return [
        [flat[low:high] for flat, (low, high) in zip(flats, shard_bounds(sizes, k, shards), strict=True)]
        for k in range(shards)
    ]


def shard_bounds(sizes: list[int], shard: int, shards: int) -> list[tuple[int, int]]:
    """Return where a shard's slice begins and ends in each of the flat tensors of these sizes."""
    return [(size * shard // shards, size * (shard + 1) // shards) for size in sizes]
