"""The shakespeare task: a small GPT that predicts the next character."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from offbeat.errors import DataError
from offbeat.experiments.tasks.base import BatchSize, Epochs, LearningRate
from offbeat.experiments.tasks.files.locate import locate
from offbeat.experiments.tasks.files.manifest import DatasetManifest, File
from offbeat.experiments.tasks.language import Context, LanguageTask
from offbeat.experiments.tasks.models.transformer import Transformer
from offbeat.experiments.tasks.text import read_text

CHARACTERS = 65
TEST_DIVISOR = 10  # the last tenth is the test text, as is usual with this text


@dataclass(frozen=True, kw_only=True)
class Shakespeare(LanguageTask):
    """Some forty thousand lines of Shakespeare, compiled by Karpathy."""

    name: ClassVar[str] = "shakespeare"
    summary: ClassVar[str] = "a million characters of Shakespeare, read from the data folder"
    metric: ClassVar[str] = "bits per character"
    models: ClassVar[tuple[str, ...]] = ("gpt",)
    manifest: ClassVar[DatasetManifest] = DatasetManifest(
        folder="tinyshakespeare",
        files=(
            File("input.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
        ),
        origin="Published on GitHub as karpathy/char-rnn (data/tinyshakespeare).",
        licence="public domain",
        addresses=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/{name}",),
    )

    batch_size: BatchSize = 16
    epochs: Epochs = 5
    lr: LearningRate = 0.001
    context: Context = 128

    def build(self) -> nn.Module:
        return Transformer(tokens=CHARACTERS, context=self.context, layers=4, heads=4, width=128, hidden=512)

    def texts(self, folder: Path | None) -> tuple[list[int], list[int]]:
        (path,) = locate(self.name, self.manifest, folder).values()
        text = read_text(path)
        numbers = {character: number for number, character in enumerate(sorted(set(text)))}
        if len(numbers) > CHARACTERS:
            raise DataError(f"{path}: holds {len(numbers)} different characters, expected {CHARACTERS}")
        tokens = [numbers[character] for character in text]
        cut = len(tokens) - len(tokens) // TEST_DIVISOR
        return tokens[:cut], tokens[cut:]

    def per_token(self, nats: float) -> float:
        return nats / math.log(2)
