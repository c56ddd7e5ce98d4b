"""Text as numbers: files of text, and vocabularies."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.experiments.tasks.text import UNKNOWN, Vocabulary, read_text


def test_the_most_frequent_words_have_numbers() -> None:
    vocabulary = Vocabulary(["b", "a", "c", "b", "a", "d", "b", "<unk>"], size=3)
    assert vocabulary.words == [UNKNOWN, "b", "a"]
    assert vocabulary.numbers(["a", "b", "c", "zebra", UNKNOWN]) == [2, 1, 0, 0, 0]
    assert Vocabulary(["b", "a"], size=9).words == [UNKNOWN, "a", "b"], "ties by alphabet, no more than are"


def test_text_is_read_compressed_or_not(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("grün\n", encoding="utf-8")
    (tmp_path / "packed.gz").write_bytes(gzip.compress("grün\n".encode()))
    assert read_text(tmp_path / "plain") == read_text(tmp_path / "packed.gz") == "grün\n"


@pytest.mark.parametrize(
    ("content", "told"), [(b" \n", "file: holds no text"), (b"\xff\xfe", r"file: is not text in UTF-8 \(")]
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=told):
        read_text(tmp_path / "file")
