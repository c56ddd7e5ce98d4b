"""GDTopK: sparse pushes, by a group's speed and the epoch (Sun et al., 2022).

    push   the k entries of (update + error) that are largest in magnitude;   error ← the others
    at the end of an epoch push all of it;   error ← 0

    k / n   in epoch    1      2      3       4       5 and later
    larger            0.35   0.35   0.1225  0.0429  0.015
    middle            0.35   0.3    0.09    0.027   0.0081
    smaller           0.35   0.25   0.0625  0.0156  0.004

The table is the authors' code's, and so is its direction: the slowest group sends the larger part, the
fastest the smaller one. Closing the gap between their speeds would ask for the reverse, `more="fast"`. Groups
in between are in the middle, and all are while there is one group only.

Ours: `answers="half"`. Weights that a worker pulls travel in half precision; with full answers no sparsity of
pushes could halve the traffic. The server's own weights, and what workers push, stay as they are. `ratio` is
one for all groups and epochs, instead of the table; 1 sparsifies nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property

from offbeat.codecs import Codec, Half, TopK
from offbeat.core.settings import build, parse_pairs
from offbeat.errors import SettingError

FIRST = 0.35
LARGER, MIDDLE, SMALLER = (
    (FIRST, 0.35, 0.1225, 0.0429, 0.015),
    (FIRST, 0.3, 0.09, 0.027, 0.0081),
    (FIRST, 0.25, 0.0625, 0.0156, 0.004),
)


@dataclass(frozen=True, kw_only=True)
class GDTopK:
    """How many entries of a push travel, by the speed of the group and by the epoch."""

    name = "gdtopk"

    more: str = "slow"
    epoch_steps: int | None = None
    ratio: float | None = None
    answers: str = "half"

    def __post_init__(self) -> None:
        if self.more not in ("slow", "fast"):
            raise SettingError(f'more={self.more!r}: which group sends more of its pushes, "slow" or "fast"')
        if self.answers not in ("half", "full"):
            raise SettingError(f'answers={self.answers!r}: the precision of pulled weights, "half" or "full"')
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise SettingError(f"ratio={self.ratio!r}: a part of a push, above 0 and at most 1")
        steps = self.epoch_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise SettingError(f"epoch_steps={steps!r}: a whole number of steps, at least 1")

    @cached_property
    def push_codecs(self) -> tuple[Codec, ...]:
        """All codecs that pushes may be compressed by."""
        return tuple(TopK(ratio) for ratio in self._ratios)

    @cached_property
    def _ratios(self) -> list[float]:
        table = {*LARGER, *MIDDLE, *SMALLER} if self.ratio is None else {self.ratio} - {1}
        return sorted(table)

    @property
    def pull_codec(self) -> Codec | None:
        return Half() if self.answers == "half" else None

    def codec_index(self, speed: int, step: int) -> int:
        """Return the codec of a push after so many steps, counted from 1; 0: exact.

        speed: 0 is the fastest group's, 2 the slowest's.
        """
        steps = self.epoch_steps
        assert steps is not None
        if step % steps == 0:
            return 0
        return 1 + self._ratios.index(r) if (r := self.ratio_at(speed, (step - 1) // steps)) < 1 else 0

    def ratio_at(self, speed: int, epoch: int) -> float:
        """Return the ratio for a group's speed in an epoch; epochs count from 0."""
        if self.ratio is not None:
            return self.ratio
        rows = (SMALLER, MIDDLE, LARGER) if self.more == "slow" else (LARGER, MIDDLE, SMALLER)
        return rows[speed][min(epoch, len(MIDDLE) - 1)]

    @classmethod
    def from_text(cls, text: str) -> GDTopK:
        """Parse what `str` writes: `gdtopk(more=fast, epoch_steps=100)`."""
        match = re.fullmatch(r"gdtopk(?:\((.*)\))?", text.strip(), re.IGNORECASE)
        if match is None:
            raise SettingError(f"{text!r}: write gdtopk, or gdtopk(more=fast, epoch_steps=100)")
        return build(cls, parse_pairs(pair for pair in (match[1] or "").split(",") if pair.strip()))

    def __str__(self) -> str:
        told = [f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"gdtopk({', '.join(told)})" if told else "gdtopk"
