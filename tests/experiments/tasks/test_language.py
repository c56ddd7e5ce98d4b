"""Language models: windows, vocabularies, perplexity and bits, and something learnt from real text."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat.errors import SettingError
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.language import TextData, mean_nats, perplexity
from tests.support.learning import learn


@given(length=st.integers(2, 60), context=st.integers(1, 12))
@settings(deadline=None)
def test_every_token_but_the_first_is_predicted_once(length: int, context: int) -> None:
    text = torch.arange(length)
    data = TextData(text, text, context)
    batched = list(data.test_batches())
    assert torch.cat([following.flatten() for _, following in batched]).tolist() == list(range(1, length))
    assert all(torch.equal(tokens + 1, following) for tokens, following in batched)
    assert len(data) == (length - 1) // context


def test_a_batch_holds_the_windows_asked_for() -> None:
    data = TextData(torch.arange(100), torch.arange(10), context=5)
    tokens, following = data.batch(torch.tensor([3, 0]))
    assert tokens.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert following.tolist() == [[16, 17, 18, 19, 20], [1, 2, 3, 4, 5]]
    assert {part.device.type for part in data.to("meta").batch(torch.tensor([1]))} == {"meta"}


class Table(nn.Module):
    """Says of each token how likely which other follows."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        super().__init__()
        self.scores = torch.tensor(probabilities).log()

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        return self.scores[tokens]


def test_the_mean_is_over_tokens_not_windows() -> None:
    # 0 1 0 | 0 0: predicted 1 after 0 (1/4), 0 after 1 (1/2), 0 after 0 (3/4) twice
    data = TextData(torch.arange(9), torch.tensor([0, 1, 0, 0, 0]), context=3)
    model = Table([[0.75, 0.25], [0.5, 0.5]])
    nats = -(math.log(1 / 4) + math.log(1 / 2) + 2 * math.log(3 / 4)) / 4
    assert mean_nats(model, data) == pytest.approx(nats, rel=1e-6)
    assert model.training
    assert task("wikitext2").evaluate(model, data) == pytest.approx(math.exp(nats), rel=1e-6)
    assert task("shakespeare").evaluate(model, data) == pytest.approx(nats / math.log(2), rel=1e-6)


def test_a_hopeless_model_has_infinite_perplexity() -> None:
    assert perplexity(1e4) == math.inf and math.isnan(perplexity(math.nan))


@pytest.mark.parametrize("name", ["wikitext2", "shakespeare"])
def test_lower_is_better(name: str) -> None:
    assert not task(name).higher_is_better


@pytest.mark.parametrize(
    ("name", "setting", "value"), [("wikitext2", "vocabulary", 1), ("shakespeare", "context", 0)]
)
def test_sizes_that_make_no_model_are_refused(name: str, setting: str, value: int) -> None:
    with pytest.raises(SettingError, match=f"{setting}=.*: a whole number of .*, at least"):
        task(name, **{setting: value})


# --- the real texts


def test_the_real_texts_have_the_published_sizes(data_folder: Path) -> None:
    words, characters = task("wikitext2").load(data_folder), task("shakespeare").load(data_folder)
    assert isinstance(words, TextData) and isinstance(characters, TextData)
    assert (len(words.train), len(words.test)) == (2_088_628, 245_569)
    assert int(words.train.max()) == 33_278 - 1
    assert len(characters.train) + len(characters.test) == 1_115_394
    assert int(characters.train.max()) == 64


def frequency_nats(data: TextData) -> float:
    """What it costs to predict the test from how frequent each token is in the training text."""
    counts = Counter(data.train.tolist())
    total = len(data.train) + len(counts)
    return -sum(math.log((counts[token] + 1) / total) for token in data.test.tolist()) / len(data.test)


@pytest.mark.parametrize(
    ("name", "file", "options", "steps"),
    [
        ("shakespeare", "tinyshakespeare/input.txt.gz", {"context": 32, "batch_size": 16, "lr": 0.003}, 40),
        (
            "wikitext2",
            "wikitext-2/wiki.train.tokens.gz",
            {"vocabulary": 200, "batch_size": 8, "lr": 0.003},
            60,
        ),
    ],
)
def test_real_text_is_learnt(
    data_folder: Path, tmp_path: Path, name: str, file: str, options: dict[str, Any], steps: int
) -> None:
    """Better than knowing how frequent every token is."""
    with gzip.open(data_folder / file, "rt", encoding="utf-8") as lines:
        text = list(islice(cycle(lines), 900))
    (tmp_path / "input.txt").write_text("".join(text))
    (tmp_path / "wiki.train.tokens").write_text("".join(text[:850]))
    (tmp_path / "wiki.test.tokens").write_text("".join(text[850:]))
    chosen = task(name, **options)
    data = chosen.load(tmp_path)
    assert isinstance(data, TextData)
    assert mean_nats(learn(chosen, data, steps), data) < frequency_nats(data)
