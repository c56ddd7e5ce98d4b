"""The shakespeare task: characters as numbers, and texts that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.language import TextData


def test_the_last_tenth_of_shakespeare_is_the_test(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("ab" * 450 + "ba" * 50)
    data = task("shakespeare").load(tmp_path)
    assert isinstance(data, TextData)
    assert (data.train.tolist(), data.test.tolist()) == ([0, 1] * 450, [1, 0] * 50)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "input.txt: holds no text"),
        (b"\xff\xfe", "input.txt: is not text in UTF-8"),
        ("".join(map(chr, range(200, 300))).encode(), "holds 100 different characters, expected 65"),
        (b"short", "the texts hold 5 and 0 tokens, expected more than 128"),
    ],
)
def test_what_is_no_such_text_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "input.txt").write_bytes(content)
    with pytest.raises(DataError, match=told):
        task("shakespeare").load(tmp_path)
