"""Non-IID partition of the data: chunks in which each worker sees only some of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from offbeat.errors import SettingError


def label_skew(
    labels: Tensor | Sequence[int], workers: int, classes_per_worker: int = 1, seed: int = 0
) -> list[Tensor]:
    """Deal sample indices into one chunk per worker, each of at most `classes_per_worker` classes.

    Chunks are equally long and share no index. Every class goes to some worker. A class of several workers is
    divided between them evenly; where chunks are unequal, random samples of the longer ones are dropped.
    """
    return _chunks(torch.as_tensor(labels), workers, classes_per_worker, seed)


@lru_cache(maxsize=1)  # in virtual time all workers use the same chunks
def _chunks(labels: Tensor, workers: int, classes_per_worker: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    classes, sizes = (found.tolist() for found in labels.unique(return_counts=True))
    pieces = _pieces_per_class(sizes, workers, classes_per_worker)
    dealt: list[Tensor] = []
    for i in torch.randperm(len(classes), generator=generator).tolist():
        rows = (labels == classes[i]).nonzero().flatten()
        mixed = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
        dealt += mixed.tensor_split(pieces[i])
    # A class has at most as many pieces as there are workers, side by side: no worker gets two of them.
    chunks = [torch.cat(dealt[worker::workers]).cpu() for worker in range(workers)]
    size = min(len(chunk) for chunk in chunks)
    if not size:
        raise SettingError(
            f"{len(labels)} samples are too few for {workers} chunks of {classes_per_worker} classes"
        )
    return [chunk[torch.randperm(len(chunk), generator=generator)[:size]] for chunk in chunks]


def _pieces_per_class(sizes: list[int], workers: int, classes_per_worker: int) -> list[int]:
    """Choose into how many pieces to divide each class: the class with the largest pieces gets one more."""
    total = workers * classes_per_worker
    fewest = -(-len(sizes) // workers)
    if not fewest <= classes_per_worker <= len(sizes):
        raise SettingError(
            f"classes_per_worker={classes_per_worker}: {len(sizes)} classes and {workers} workers need "
            f"{fewest} to {len(sizes)}, so that every class goes to some worker"
        )
    pieces = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        divisible = [i for i in range(len(sizes)) if pieces[i] < workers]
        pieces[max(divisible, key=lambda i: sizes[i] / pieces[i])] += 1
    return pieces
