"""Text as numbers: files of text, and vocabularies."""

from __future__ import annotations

from offbeat.experiments.tasks.text import UNKNOWN, Vocabulary


def test_the_most_frequent_words_have_numbers() -> None:
    vocabulary = Vocabulary(["b", "a", "c", "b", "a", "d", "b", "<unk>"], size=3)
    assert vocabulary.words == [UNKNOWN, "b", "a"]
    assert vocabulary.numbers(["a", "b", "c", "zebra", UNKNOWN]) == [2, 1, 0, 0, 0]
    assert Vocabulary(["b", "a"], size=9).words == [UNKNOWN, "a", "b"], "ties by alphabet, no more than are"
