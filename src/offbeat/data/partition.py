"""Skew: shards of the data in which each worker sees some of the classes only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from offbeat.errors import SettingError


def label_skew(
    labels: Tensor | Sequence[int], workers: int, classes_per_worker: int = 1, seed: int = 0
) -> list[Tensor]:
    """A shard of indices for each worker, equally many, no index twice, of at most so many classes.

    Every class goes to somebody. A class that goes to several workers is divided between them evenly;
    where shards come out unequal, the longer ones are cut, at random.
    """
    return _shards(torch.as_tensor(labels), workers, classes_per_worker, seed)


@lru_cache(maxsize=1)  # in virtual time all workers ask for the same
def _shards(labels: Tensor, workers: int, classes_per_worker: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    classes, sizes = (found.tolist() for found in labels.unique(return_counts=True))
    pieces = _pieces_a_class(sizes, workers, classes_per_worker)
    dealt: list[Tensor] = []
    for i in torch.randperm(len(classes), generator=generator).tolist():
        rows = (labels == classes[i]).nonzero().flatten()
        mixed = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
        dealt += mixed.tensor_split(pieces[i])
    # The pieces of a class lie side by side, at most as many as there are workers: no worker gets two.
    shards = [torch.cat(dealt[worker::workers]).cpu() for worker in range(workers)]
    size = min(len(shard) for shard in shards)
    if not size:
        raise SettingError(
            f"{len(labels)} samples are too few for {workers} shards of {classes_per_worker} classes"
        )
    return [shard[torch.randperm(len(shard), generator=generator)[:size]] for shard in shards]


def _pieces_a_class(sizes: list[int], workers: int, classes_per_worker: int) -> list[int]:
    """Into how many pieces to divide each class: those that are largest a piece get one more."""
    total = workers * classes_per_worker
    fewest = -(-len(sizes) // workers)
    if not fewest <= classes_per_worker <= len(sizes):
        raise SettingError(
            f"classes_per_worker={classes_per_worker}: {len(sizes)} classes and {workers} workers need "
            f"{fewest} to {len(sizes)}, so that every class goes to somebody"
        )
    pieces = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        open_ones = [i for i in range(len(sizes)) if pieces[i] < workers]
        pieces[max(open_ones, key=lambda i: sizes[i] / pieces[i])] += 1
    return pieces
