"""Translation: BLEU by hand, sentences in rows, batches by length, and real sentences learnt."""

from __future__ import annotations

import gzip
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.batching import batches, by_length, shuffled
from offbeat.data.samplers import DefDP, SelDP
from offbeat.errors import DataError, SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.bleu import bleu
from offbeat.experiments.tasks.models.seq2seq import END, PAD
from offbeat.experiments.tasks.multi30k import decode, sentences_of
from offbeat.experiments.tasks.translation_data import Rows, SentencePairs
from offbeat.strategies.bsp import BSP
from tests.support.learning import learn
from tests.support.small_data import write_small

# --- BLEU


def score(said: str, meant: str) -> float:
    """Of sentences between strokes, as in "a b / c d"."""
    return bleu(*([sentence.split() for sentence in text.split("/")] for text in (said, meant)))


def test_a_perfect_translation_has_100() -> None:
    assert score("a b c d e / f g h i", "a b c d e / f g h i") == pytest.approx(100)


def test_precisions_are_multiplied() -> None:
    # 4/5 words, 3/4 pairs, 2/3 triples, 1/2 of fours; as long as it should be
    assert score("a b c d x", "a b c d e") == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_counts_are_added_before_they_are_divided() -> None:
    # one sentence all right, one all wrong: 4/8, 3/6, 2/4, 1/2
    assert score("a b c d / w x y z", "a b c d / k l m n") == pytest.approx(50)


def test_a_word_counts_at_most_as_often_as_in_the_reference() -> None:
    # the paper's example: 2 of 7 words, but no pair is right
    assert score("the the the the the the the", "the cat is on the mat") == 0.0
    expected = 100 * (4 / 8 * 3 / 7 * 2 / 6 * 1 / 5) ** 0.25
    assert score("a b c d a b c d", "a b c d") == pytest.approx(expected)


def test_short_translations_are_punished() -> None:
    # all of it right, but 4 of 6 words: e^(1 − 6/4)
    assert score("a b c d", "a b c d e f") == pytest.approx(100 * math.exp(-0.5))


def test_brevity_is_that_of_the_corpus() -> None:
    hits = (10 / 12 * 8 / 10 * 6 / 8 * 4 / 6) ** 0.25
    said, meant = "a b c d / e f g h i j k l", "a b c d x y / e f g h i j"
    assert score(said, meant) == pytest.approx(100 * hits), "12 words for 12"


def test_nothing_in_common_is_nothing() -> None:
    assert score("", "a b c d") == 0.0
    assert score("a b c", "a b c") == 0.0, "no four words"


# --- rows of numbers


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=9), st.data())
@settings(deadline=None)
def test_rows_hold_the_sentences(sentences: list[list[int]], data: st.DataObject) -> None:
    rows = Rows.of(sentences)
    chosen = data.draw(st.lists(st.integers(0, len(sentences) - 1), min_size=1))
    taken = rows.take(torch.tensor(chosen)).tolist()
    assert [[number for number in row if number != PAD] for row in taken] == [sentences[i] for i in chosen]
    assert {len(row) for row in taken} == {max(len(sentences[i]) for i in chosen)}


def test_sentences_are_words_and_marks_in_lower_case(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("Ein Mann, grün!\n\nT-Shirt\n", encoding="utf-8")
    assert sentences_of(tmp_path / "lines") == [["ein", "mann", ",", "grün", "!"], [], ["t", "-", "shirt"]]


def test_a_translation_ends_where_it_ends() -> None:
    assert decode([4, 5, END, PAD, PAD], ["", "", "", "", "x", "y"]) == ["x", "y"]


def test_data_moves_to_the_device_and_lengths_stay(tmp_path: Path) -> None:
    write_small(tmp_path)
    data = task("multi30k").load(tmp_path).to("meta")
    assert isinstance(data, SentencePairs) and len(data) == 48
    assert {part.device.type for part in data.batch(torch.arange(3))} == {"meta"}
    assert data.lengths.device.type == "cpu"


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


# --- batches by length


@given(samples=st.integers(4, 90), workers=st.integers(1, 4), size=st.integers(1, 9), seed=st.integers(0, 5))
@settings(deadline=None)
def test_runs_are_sorted_parts_of_the_same_samples(samples: int, workers: int, size: int, seed: int) -> None:
    lengths = torch.arange(samples).mul(7).remainder(5)
    order = shuffled(samples, seed, 0)
    together = min(workers * size, samples)
    runs = by_length(order, lengths, together, seed, 0)
    assert sorted(runs.tolist()) == list(range(samples))
    full = samples // together * together
    assert sorted(runs[:full].tolist()) == sorted(order[:full].tolist()), "what is left out is left to chance"
    spans = sorted((int(lengths[r].min()), int(lengths[r].max())) for r in runs[:full].split(together))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_workers_share_a_step_of_similar_lengths_and_no_sample() -> None:
    lengths = torch.randint(1, 40, (400,), generator=torch.Generator().manual_seed(0))
    ranks = [batches(400, rank, 4, 5, seed=3, lengths=lengths) for rank in range(4)]
    seen: list[int] = []
    widest = 0
    for _ in range(20):
        step = torch.cat([next(rank) for rank in ranks])
        seen += step.tolist()
        widest = max(widest, int(lengths[step].max() - lengths[step].min()))
    assert sorted(seen) == list(range(400)), "an epoch is all of the data"
    assert widest <= 6, "of 39; 20 of 400 samples in order span about 2"
    mean = lengths[torch.tensor(seen)].float().reshape(20, 20).mean(dim=1).tolist()
    assert mean not in (sorted(mean), sorted(mean, reverse=True)), "short and long ones take turns"
    again = torch.cat([next(rank) for rank in ranks])
    assert again.tolist() != seen[:20]


def test_without_lengths_the_order_is_as_it_was() -> None:
    drawn = batches(23, 1, 2, 3, seed=5)
    order = shuffled(23, 5, 0)[1:22:2]
    assert [next(drawn).tolist() for _ in range(3)] == [order[i : i + 3].tolist() for i in (0, 3, 6)]


@pytest.mark.parametrize("sampler", [SelDP, DefDP])
def test_samplers_batch_by_length_too(sampler: type[SelDP] | type[DefDP]) -> None:
    lengths = torch.arange(60).mul(7).remainder(10)
    drawn = sampler(60, 0, 2, 1).batches(5, lengths)
    first = torch.stack([next(drawn) for _ in range(6)])
    assert sorted(first.flatten().tolist()) == sorted(sampler(60, 0, 2, 1).at(0).tolist())
    assert int((lengths[first].max(dim=1).values - lengths[first].min(dim=1).values).max()) <= 3


def test_samples_of_differing_lengths_are_not_lent(tmp_path: Path) -> None:
    write_small(tmp_path)
    chosen = task("multi30k")
    job = Job(task=chosen, strategy=BSP(), workers=2, inject=(0.5, 0.5))
    with pytest.raises(SettingError, match="multi30k has samples of different lengths"):
        job.batches(chosen.load(tmp_path), 0, 4)


# --- the real thing


@pytest.mark.usefixtures("one_thread")
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
