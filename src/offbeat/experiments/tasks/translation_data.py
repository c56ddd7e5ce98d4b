"""Sentences and their translations as tensors, for batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from offbeat.experiments.tasks.base import Batch, Data
from offbeat.experiments.tasks.models.seq2seq import PAD

TEST_BATCH = 128

Words = list[list[str]]


class Rows(NamedTuple):
    """Sentences as rows of word numbers, with padding at the end."""

    tokens: Tensor
    lengths: Tensor  # on the CPU, so that the width of a batch is known without a GPU transfer

    @classmethod
    def of(cls, sentences: list[list[int]]) -> Self:
        """Pad sentences to the length of the longest."""
        lengths = np.array([len(sentence) for sentence in sentences])
        padded = np.full((len(sentences), lengths.max()), PAD)
        padded[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(sentences)
        return cls(torch.from_numpy(padded), torch.from_numpy(lengths))

    def take(self, indices: Tensor) -> Tensor:
        """Return the rows at these indices, as wide as the longest of them."""
        width = int(self.lengths[indices].max())
        return self.tokens[:, :width][indices.to(self.tokens.device)]

    def to(self, device: torch.device | str) -> Rows:
        """Return the same rows on another device."""
        return Rows(self.tokens.to(device), self.lengths)


class SentencePairs(Data):
    """Sentence pairs for training and test; for the test also the words of the reference translations."""

    def __init__(
        self, train: tuple[Rows, Rows], test: tuple[Rows, Rows], references: Words, words: list[str]
    ) -> None:
        self.train = train
        self.test = test
        self.references = references
        self.words = words
        self._lengths = train[0].lengths + train[1].lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    def batch(self, indices: Tensor) -> Batch:
        source, target = self.train
        return source.take(indices), target.take(indices)

    def test_batches(self) -> Iterator[Batch]:
        source, target = self.test
        for indices in torch.arange(len(self.references)).split(TEST_BATCH):
            yield source.take(indices), target.take(indices)

    def to(self, device: torch.device | str) -> Self:
        train, test = ((source.to(device), target.to(device)) for source, target in (self.train, self.test))
        return type(self)(train, test, self.references, self.words)
