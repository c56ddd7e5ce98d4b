"""GDTopK: sparse pushes, by a group's speed and the epoch (Sun et al., 2022).

    push   the k entries of (update + error) that are largest in magnitude;   error ← the others
    at the end of an epoch push all of it;   error ← 0                          (`dense`)

    k = max(floor, the table's) · n

    k / n   in epoch    1      2      3       4       5 and later
    larger            0.35   0.35   0.1225  0.0429  0.015
    middle            0.35   0.3    0.09    0.027   0.0081
    smaller           0.35   0.25   0.0625  0.0156  0.004

The table and its direction are from the authors' code: the slowest group sends the larger part, the fastest
the smaller one. Closing the gap between their speeds would need the reverse, `more="fast"`. Groups in between
use the middle row, and so does a single group.

Ours: `floor`. The table's last ratios hold back most of what was learned in an epoch; the dense push is then
one large step in an old direction. At the authors' learning rate of 0.001 that does little harm, at larger
ones much. `floor=0` is their table, `dense=False` keeps the residual for later pushes. The k entries are of
the whole slice of the model that a shard holds, where the authors take them tensor by tensor: that was no
better (docs/log.md).

`answers="half"`. Weights that a worker pulls travel in half precision; with full answers no sparsity of
pushes could halve the traffic. The server's own weights, and what workers push, stay as they are. `ratio` is
one for all groups and epochs, instead of the table; 1 sparsifies nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from offbeat.codecs import Codec, Half, TopK
from offbeat.core.fields import Choice, Flag, Number, Whole
from offbeat.core.settings import Settings, build, call_text, parse_pairs
from offbeat.errors import SettingError

FIRST = 0.35
LARGER, MIDDLE, SMALLER = (
    (FIRST, 0.35, 0.1225, 0.0429, 0.015),
    (FIRST, 0.3, 0.09, 0.027, 0.0081),
    (FIRST, 0.25, 0.0625, 0.0156, 0.004),
)


@dataclass(frozen=True, kw_only=True)
class GDTopK(Settings):
    """Sparsity of pushes: the fraction of entries that is sent, by the group's speed and the epoch."""

    name = "gdtopk"

    more: Annotated[str, Choice("which groups send more of their pushes", of=("slow", "fast"))] = "slow"
    epoch_steps: Annotated[
        int | None, Whole("steps per epoch; None: as the loop reports", of="steps", at_least=1)
    ] = None
    ratio: Annotated[
        float | None,
        Number(
            "fraction sent by all groups in all epochs; None: by group and epoch",
            noun="a fraction of a push",
            above=0,
            at_most=1,
        ),
    ] = None
    floor: Annotated[
        float,
        Number(
            "least fraction that the table may ask for; 0: the authors' table as it is",
            noun="a fraction of a push",
            at_least=0,
            at_most=1,
        ),
    ] = 0.05
    dense: Annotated[bool, Flag("push everything at the end of an epoch")] = True
    answers: Annotated[str, Choice("precision of the weights that workers pull", of=("half", "full"))] = (
        "half"
    )

    @cached_property
    def push_codecs(self) -> tuple[Codec, ...]:
        """All codecs that may compress pushes."""
        return tuple(TopK(ratio) for ratio in self._ratios)

    @cached_property
    def _ratios(self) -> list[float]:
        table = {*LARGER, *MIDDLE, *SMALLER} if self.ratio is None else {self.ratio}
        return sorted({self._at_least_floor(ratio) for ratio in table} - {1})

    @property
    def pull_codec(self) -> Codec | None:
        return Half() if self.answers == "half" else None

    def codec_index(self, speed: int, step: int) -> int:
        """Return the number of the codec that compresses push `step`, from 1; 0: the push is sent whole.

        speed: 0 is the fastest group's, 2 the slowest's.
        """
        steps = self.epoch_steps
        assert steps is not None
        if self.dense and step % steps == 0:
            return 0
        return 1 + self._ratios.index(r) if (r := self.ratio_at(speed, (step - 1) // steps)) < 1 else 0

    def ratio_at(self, speed: int, epoch: int) -> float:
        """Return the ratio for a group's speed in an epoch; epochs count from 0."""
        if self.ratio is not None:
            return self.ratio
        rows = (SMALLER, MIDDLE, LARGER) if self.more == "slow" else (LARGER, MIDDLE, SMALLER)
        return self._at_least_floor(rows[speed][min(epoch, len(MIDDLE) - 1)])

    def _at_least_floor(self, ratio: float) -> float:
        return ratio if self.ratio is not None else max(ratio, self.floor)

    @classmethod
    def from_text(cls, text: str) -> GDTopK:
        """Parse what `str` writes: `gdtopk(more=fast, epoch_steps=100)`."""
        match = re.fullmatch(r"gdtopk(?:\((.*)\))?", text.strip(), re.IGNORECASE)
        if match is None:
            raise SettingError("write gdtopk, or gdtopk(more=fast, epoch_steps=100)")
        return build(cls, parse_pairs(pair for pair in (match[1] or "").split(",") if pair.strip()))

    def __str__(self) -> str:
        return call_text(self)
