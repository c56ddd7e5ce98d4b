"""The wikitext2 task: words and ends of lines as numbers."""

from __future__ import annotations

from pathlib import Path

from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.language import TextData


def test_lines_end_with_a_word_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.tokens").write_text(" \n = a = \n b <unk> \n" * 10)
    (tmp_path / "wiki.test.tokens").write_text("b\nnew\n")
    data = task("wikitext2", context=4).load(tmp_path)
    assert isinstance(data, TextData)
    unk, eos, equals, a, b = range(5)
    assert data.train.tolist() == [eos, equals, a, equals, eos, b, unk, eos] * 10
    assert data.test.tolist() == [b, eos, unk, eos]
