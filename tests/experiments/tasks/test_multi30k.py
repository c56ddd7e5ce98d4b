"""The multi30k task: sentences as words, a loss without padding, and real sentences learnt."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from offbeat.errors import DataError
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.models.seq2seq import END, PAD
from offbeat.experiments.tasks.multi30k import decode, sentences_of
from offbeat.experiments.tasks.translation_data import SentencePairs
from tests.support.learning import learn
from tests.support.small_data import write_small


def test_sentences_are_words_and_marks_in_lower_case(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("Ein Mann, grün!\n\nT-Shirt\n", encoding="utf-8")
    assert sentences_of(tmp_path / "lines") == [["ein", "mann", ",", "grün", "!"], [], ["t", "-", "shirt"]]


def test_a_translation_ends_where_it_ends() -> None:
    assert decode([4, 5, END, PAD, PAD], ["", "", "", "", "x", "y"]) == ["x", "y"]
    assert decode([4, 9], ["", "", "", "", "x"]) == ["x", "<unk>"], (
        "a model may have more words than the text"
    )


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_small(tmp_path)
    with (tmp_path / "multi30k" / "train.en").open("a") as file:
        file.write("one more\n")
    with pytest.raises(DataError, match="train files hold 48 German and 49 English sentences"):
        task("multi30k").load(tmp_path)


def test_padding_is_not_learnt(tmp_path: Path) -> None:
    """The loss is the mean over the words: of a short sentence and a long one together as of each alone."""
    write_small(tmp_path)
    chosen = task("multi30k")
    data = chosen.load(tmp_path)
    model = chosen.build().eval()
    assert isinstance(data, SentencePairs)
    pair = torch.stack((data.lengths.argmin(), data.lengths.argmax()))
    each = torch.stack([chosen.loss(model, data.batch(one)) for one in pair.split(1)])
    words = data.train[1].lengths[pair] - 1  # the first is given
    assert words[0] < words[1]
    torch.testing.assert_close(chosen.loss(model, data.batch(pair)), (each * words).sum() / words.sum())


def test_real_sentences_are_learnt_by_heart(data_folder: Path, tmp_path: Path) -> None:
    """Four sentences, translated as they were learnt; their words are then hardly a surprise."""
    for language in ("de", "en"):
        with gzip.open(data_folder / "multi30k" / f"train.{language}.gz", "rt", encoding="utf-8") as lines:
            text = "".join(next(lines) for _ in range(4))
        for split in ("train", "test_2016_flickr"):
            (tmp_path / f"{split}.{language}").write_text(text, encoding="utf-8")
    chosen = task("multi30k", source_words=100, target_words=100, batch_size=4, lr=0.003)
    data = chosen.load(tmp_path)
    model = learn(chosen, data, steps=25)
    assert chosen.evaluate(model, data) > 90
    assert chosen.extra_metrics(model, data)["perplexity"] < 1.5
