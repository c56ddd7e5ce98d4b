"""The wikitext2 task: words of Wikipedia, and a 2-layer Transformer as in SelSync's experiments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from torch import nn

from offbeat.core.fields import Whole
from offbeat.experiments.tasks.base import BatchSize, Epochs, LearningRate
from offbeat.experiments.tasks.files.locate import locate
from offbeat.experiments.tasks.files.manifest import DatasetManifest, File
from offbeat.experiments.tasks.language import Context, LanguageTask, perplexity
from offbeat.experiments.tasks.models.transformer import Transformer
from offbeat.experiments.tasks.text import UNKNOWN, Vocabulary, read_text

END = "<eos>"
TRAIN, TEST = "wiki.train.tokens", "wiki.test.tokens"


@dataclass(frozen=True, kw_only=True)
class WikiText2(LanguageTask):
    """WikiText-2 by Merity, Xiong, Bradbury and Socher. Two layers are SelSync's, other sizes ours."""

    name: ClassVar[str] = "wikitext2"
    summary: ClassVar[str] = "WikiText-2: two million words of Wikipedia, read from the data folder"
    metric: ClassVar[str] = "perplexity"
    models: ClassVar[tuple[str, ...]] = ("transformer",)
    manifest: ClassVar[DatasetManifest] = DatasetManifest(
        folder="wikitext-2",
        files=(
            File(TRAIN, 10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
            File(TEST, 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        ),
        origin="Published by Merity, Xiong, Bradbury and Socher as WikiText-2 (wikitext-2-v1.zip);"
        " the second address is its first one.",
        licence="CC BY-SA",
        addresses=(
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
        ),
    )

    batch_size: BatchSize = 20
    epochs: Epochs = 10
    lr: LearningRate = 0.001
    context: Context = 35
    # by default all words of the training text, <unk> and <eos>
    vocabulary: Annotated[int, Whole("words in the vocabulary", of="words", at_least=2)] = 33_278

    def build(self) -> nn.Module:
        return Transformer(
            tokens=self.vocabulary,
            context=self.context,
            layers=2,
            heads=2,
            width=200,
            hidden=200,
            dropout=0.2,
        )

    def texts(self, folder: Path | None) -> tuple[list[int], list[int]]:
        train, test = (words_of(path) for path in locate(self.name, self.manifest, folder).values())
        vocabulary = Vocabulary(train, self.vocabulary, (UNKNOWN, END))
        return vocabulary.numbers(train), vocabulary.numbers(test)

    def per_token(self, nats: float) -> float:
        return perplexity(nats)


def words_of(path: Path) -> list[str]:
    """Read the words of a file, with <eos> after each line, also after empty ones."""
    return read_text(path).replace("\n", f" {END} ").split()
