"""Text as numbers: reading of text files, and the vocabulary that numbers their words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.compression import content

UNKNOWN = "<unk>"


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, compressed or not; it must not be empty."""
    try:
        text = content(path, "text in UTF-8").decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not text in UTF-8 ({error})") from error
    if not text.strip():
        raise DataError(f"{path}: holds no text")
    return text


class Vocabulary:
    """A numbering of words: first the `special` ones, then the most frequent, at most `size` in all.

    Equally frequent words are in alphabetical order. All other words have the number of <unk>.
    """

    def __init__(self, words: Iterable[str], size: int, special: Sequence[str] = (UNKNOWN,)) -> None:
        counts = Counter(words)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        frequent = [word for word, _ in ranked if word not in special]
        self.words = [*special, *frequent[: size - len(special)]]
        self._numbers = {word: number for number, word in enumerate(self.words)}
        self._unknown = self._numbers[UNKNOWN]

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, words: Iterable[str]) -> list[int]:
        """Return the number of each word."""
        number_of, unknown = self._numbers.get, self._unknown
        return [number_of(word, unknown) for word in words]
