"""Text as numbers: reading it, and the vocabulary that numbers its words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.compression import content

UNKNOWN = "<unk>"


def read_text(path: Path) -> str:
    try:
        text = content(path, "text in UTF-8").decode()
    except UnicodeDecodeError as reason:
        raise DataError(f"{path}: is not text in UTF-8 ({reason})") from reason
    if not text.strip():
        raise DataError(f"{path}: holds no text")
    return text


class Vocabulary:
    """The numbers of words: first `special` ones, then the most frequent, `size` in all at the most.

    Words that are equally frequent come in alphabetical order. All others have the number of <unk>.
    """

    def __init__(self, words: Iterable[str], size: int, special: Sequence[str] = (UNKNOWN,)) -> None:
        counts = Counter(words)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        usual = [word for word, _ in ranked if word not in special]
        self.words = [*special, *usual[: size - len(special)]]
        self._numbers = {word: number for number, word in enumerate(self.words)}
        self._unknown = self._numbers[UNKNOWN]

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, words: Iterable[str]) -> list[int]:
        known, unknown = self._numbers.get, self._unknown
        return [known(word, unknown) for word in words]
