"""Language models that predict the next token: the base of the wikitext2 and shakespeare tasks.

A sample is a window of `context` tokens of the text; windows follow each other without overlap. The model
predicts every token of a window from the tokens before it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.core.fields import Whole
from offbeat.errors import DataError
from offbeat.experiments.tasks.base import Batch, Data, Task, evaluating

TEST_TOKENS = 4096  # per batch: scores of a large vocabulary take memory

Context = Annotated[int, Whole("tokens per sample", of="tokens", at_least=1)]


class TextData(Data):
    """The training text and the test text, each as one long row of tokens, and the windows on them."""

    def __init__(self, train: Tensor, test: Tensor, context: int) -> None:
        self.train = train
        self.test = test
        self.context = context
        self._windows = windows(train, context)

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: Tensor) -> Batch:
        """Return tokens, and the token after each."""
        chosen = self._windows[indices.to(self._windows.device)]
        return chosen[:, :-1], chosen[:, 1:]

    def test_batches(self) -> Iterator[Batch]:
        """Yield batches in which every token of the test text but its first is predicted once."""
        whole = windows(self.test, self.context)
        for part in whole.split(max(1, TEST_TOKENS // self.context)):
            yield part[:, :-1], part[:, 1:]
        rest = self.test[len(whole) * self.context :]
        if len(rest) > 1:
            yield rest[None, :-1], rest[None, 1:]

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.train.to(device), self.test.to(device), self.context)


def windows(text: Tensor, context: int) -> Tensor:
    """View a text as rows of context + 1 tokens; a row's last is the next one's first. Copies nothing."""
    if len(text) <= context:
        return text.new_empty(0, context + 1)
    return text.unfold(0, context + 1, context)


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """Next-token prediction with cross-entropy, AdamW and clipped gradients; `per_token` gives the metric."""

    higher_is_better: ClassVar[bool] = False
    max_norm: ClassVar[float | None] = 1.0

    context: Context = 64

    @abstractmethod
    def texts(self, folder: Path | None) -> tuple[list[int], list[int]]:
        """Read the training text and the test text, as token numbers."""

    @abstractmethod
    def per_token(self, nats: float) -> float:
        """Compute the metric from the mean of −ln p over the tokens."""

    def load(self, folder: Path | None = None) -> TextData:
        train, test = self.texts(folder)
        if len(train) <= self.context or len(test) < 2:
            raise DataError(
                f"{self.name}: the texts hold {len(train)} and {len(test)} tokens,"
                f" expected more than {self.context} to train on and 2 or more for the test"
            )
        return TextData(torch.tensor(train), torch.tensor(test), self.context)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, following = batch
        return functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    def evaluate(self, model: nn.Module, data: Data) -> float:
        return self.per_token(mean_nats(model, data))


def mean_nats(model: nn.Module, data: Data) -> float:
    """Compute the mean of −ln p over all tokens of the test text."""
    nats: list[Tensor] = []
    tokens = 0
    with evaluating(model), torch.no_grad():
        for inputs, following in data.test_batches():
            scores = model(inputs).flatten(0, 1)
            nats.append(functional.cross_entropy(scores, following.flatten(), reduction="sum").double())
            tokens += following.numel()
    return torch.stack(nats).sum().item() / tokens


def perplexity(nats: float) -> float:
    """Compute e^nats; infinity beyond the range of floats."""
    return math.inf if nats > 700 else math.exp(nats)
