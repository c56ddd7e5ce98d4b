"""The multi30k task: translation of German descriptions of photographs into English."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.core.fields import Whole
from offbeat.errors import DataError
from offbeat.experiments.tasks.base import Batch, BatchSize, Data, Epochs, LearningRate, Task, evaluating
from offbeat.experiments.tasks.bleu import bleu
from offbeat.experiments.tasks.files.locate import locate
from offbeat.experiments.tasks.files.manifest import DatasetManifest, File
from offbeat.experiments.tasks.language import perplexity
from offbeat.experiments.tasks.models.seq2seq import BEGIN, END, PAD, Seq2Seq
from offbeat.experiments.tasks.text import UNKNOWN, Vocabulary, read_text
from offbeat.experiments.tasks.translation_data import Rows, SentencePairs, Words

SPECIAL = ("<pad>", UNKNOWN, "<bos>", "<eos>")  # in the order of the numbers in seq2seq.py
WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class Multi30k(Task):
    """Multi30k by Elliott, Frank, Sima'an and Specia. Sizes, batch and clipping are those of GSSP's code."""

    name: ClassVar[str] = "multi30k"
    summary: ClassVar[str] = "Multi30k: 29,000 German sentences into English, read from the data folder"
    metric: ClassVar[str] = "bleu"
    models: ClassVar[tuple[str, ...]] = ("seq2seq",)
    max_norm: ClassVar[float | None] = 1.0
    manifest: ClassVar[DatasetManifest] = DatasetManifest(
        folder="multi30k",
        files=(
            File("train.de", 2_110_398, "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72"),
            File("train.en", 1_801_238, "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6"),
            File(
                "test_2016_flickr.de",
                70_649,
                "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
            ),
            File(
                "test_2016_flickr.en",
                62_076,
                "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
            ),
        ),
        origin="Published on GitHub as multi30k/dataset (data/task1/raw).",
        licence="research and education only",
        addresses=("https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{name}.gz",),
    )

    batch_size: BatchSize = 32
    epochs: Epochs = 10
    lr: LearningRate = 0.001
    # enough for the words that occur twice or more: 7,878 German, 5,894 English
    source_words: Annotated[int, Whole("German words in the vocabulary", at_least=len(SPECIAL))] = 8000
    target_words: Annotated[int, Whole("English words in the vocabulary", at_least=len(SPECIAL))] = 6000

    def load(self, folder: Path | None = None) -> SentencePairs:
        paths = locate(self.name, self.manifest, folder)
        german, english, test_german, test_english = map(sentences_of, paths.values())
        for (source, target), split in (((german, english), "train"), ((test_german, test_english), "test")):
            if len(source) != len(target):
                raise DataError(
                    f"{self.name}: the {split} files hold {len(source)} German and {len(target)} English"
                    " sentences, expected equally many"
                )
        source_vocabulary = Vocabulary(chain.from_iterable(german), self.source_words, SPECIAL)
        target_vocabulary = Vocabulary(chain.from_iterable(english), self.target_words, SPECIAL)

        def encode(sentences: Words, vocabulary: Vocabulary, *begin: int) -> Rows:
            return Rows.of([[*begin, *vocabulary.numbers(line), END] for line in sentences])

        return SentencePairs(
            (encode(german, source_vocabulary), encode(english, target_vocabulary, BEGIN)),
            (encode(test_german, source_vocabulary), encode(test_english, target_vocabulary, BEGIN)),
            test_english,
            target_vocabulary.words,
        )

    def build(self) -> nn.Module:
        return Seq2Seq(
            source_words=self.source_words,
            target_words=self.target_words,
            embedding=256,
            hidden=512,
            dropout=0.5,
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean loss over the target's words, each predicted from the true words before it."""
        return nats(model, batch, "mean")

    def evaluate(self, model: nn.Module, data: Data) -> float:
        """Compute the BLEU of greedy translations, in lower case, over words and punctuation marks."""
        assert isinstance(model, Seq2Seq) and isinstance(data, SentencePairs)
        translations: Words = []
        with evaluating(model), torch.no_grad():
            for source, _ in data.test_batches():
                longest = 10 + 3 * source.shape[1] // 2
                translations += [decode(row, data.words) for row in model.translate(source, longest).tolist()]
        return bleu(translations, data.references)

    def extra_metrics(self, model: nn.Module, data: Data) -> dict[str, float]:
        """Compute the perplexity per word of the references, including the ends of sentences."""
        total: list[Tensor] = []
        words: list[Tensor] = []
        with evaluating(model), torch.no_grad():
            for batch in data.test_batches():
                total.append(nats(model, batch, "sum").double())
                words.append((batch[1][:, 1:] != PAD).sum())
        mean = torch.stack(total).sum() / torch.stack(words).sum()
        return {"perplexity": perplexity(mean.item())}


def nats(model: nn.Module, batch: Batch, reduction: str) -> Tensor:
    """Compute −ln p of the words of the targets."""
    source, target = batch
    scores = model(source, target[:, :-1])
    return functional.cross_entropy(
        scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, reduction=reduction
    )


def sentences_of(path: Path) -> Words:
    """Read the words and punctuation marks of each line, in lower case."""
    return [WORD.findall(line) for line in read_text(path).lower().rstrip("\n").split("\n")]


def decode(numbers: list[int], words: list[str]) -> list[str]:
    """Return the words of a translation up to its end.

    Where a text has fewer words than the model, an untrained one may choose a number that stands for none.
    """
    known = len(words)
    return [words[n] if n < known else UNKNOWN for n in numbers if n not in (PAD, END)]
