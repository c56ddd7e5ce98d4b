"""BLEU against scores worked out by hand."""

from __future__ import annotations

import math

import pytest

from offbeat.experiments.tasks.bleu import bleu


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
