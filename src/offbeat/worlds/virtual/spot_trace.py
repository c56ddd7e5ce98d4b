"""Traces of spot preemptions, in the format of SkyPilot's public spot-traces.

    {"metadata": {"gap_seconds": 300}, "data": [0, 1, 1, 1, 0, …]}

An entry holds for `gap_seconds`, and counts the machines that are available then: at most 1 in traces of one
node, at most 4 or 16 in those of several. So says the collection's README, and its data bear it out: four of
its traces of preemption begin with one 0, while a machine starts, and have 1 ever after, or nearly.

In a trace of N nodes, N workers are the nodes of one zone: worker r is node r mod N, and node k is there
while more than k machines are. The workers of a zone read the trace from one offset, so nodes that were lost
together are lost together: in the collection's six traces of several nodes none is there for 16 to 62% of the
time; it would be 0.0003 to 18% if nodes were independent. Each zone has an offset of its own, by seed, and so
has each worker in a trace of one node. It begins at an entry with all nodes: a run begins when all workers
have a machine. After its last entry a trace begins anew. [ours]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import SettingError
from offbeat.worlds.virtual.cluster import Absence
from offbeat.worlds.virtual.failures import AbsenceSource
from offbeat.worlds.virtual.random_numbers import uniform

_SPACE = re.compile(r"[ \t\n\r]*")
_OFFSET = 1 << 33  # in the place of a step: numbers of step times stay their own


@dataclass(frozen=True)
class SpotTrace(AbsenceSource):
    """Trace of how many spot machines were available; a machine that is taken away costs nothing."""

    gap_s: float
    available: tuple[int, ...]
    paid_away = False

    @property
    def seconds(self) -> float:
        """The time that the trace covers."""
        return self.gap_s * len(self.available)

    def absences(self, worker: int, seed: int, until_s: float) -> list[Absence]:
        nodes = max(self.available)
        zone, node = divmod(worker, nodes)
        full = [index for index, machines in enumerate(self.available) if machines == nodes]
        first = full[int(uniform(seed, zone, _OFFSET) * len(full))]
        found: list[Absence] = []
        began: int | None = None
        for number in range(math.ceil(until_s / self.gap_s) + len(self.available)):
            taken = self.available[(first + number) % len(self.available)] <= node
            if taken and began is None:
                began = number
            if not taken:
                if began is not None:
                    found.append(
                        Absence(worker=worker, from_s=began * self.gap_s, until_s=number * self.gap_s)
                    )
                began = None
                if number * self.gap_s >= until_s:
                    break
        return [absence for absence in found if absence.from_s < until_s]


def load_spot_trace(file: Path) -> SpotTrace:
    """Read a trace; an error names the file and the line."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{file}: the trace cannot be read: {reason}") from None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError(f"{file}, line {error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise SettingError(f"{file}: not a trace: its lists are nested too deeply") from None
    return _Reader(str(file), text).read()


def is_spot_trace(file: Path) -> bool:
    """Return whether a file exists and is a trace of preemptions."""
    try:
        return file.exists() and bool(load_spot_trace(file))
    except SettingError:
        return False


class _Item(NamedTuple):
    key: Any  # of an object a text, of a list a number
    value: Any
    at: int  # where the value begins in the text


class _Reader:
    """A text of valid JSON, and where its values begin: `json` itself does not tell."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text
        self._decoder = json.JSONDecoder()

    def read(self) -> SpotTrace:
        whole = self._object(self._space(0), "the trace")
        metadata = self._member(whole, "metadata", 0)
        gap = self._member(self._object(metadata.at, "metadata"), "gap_seconds", metadata.at)
        if type(gap.value) not in (int, float) or not 0 < gap.value < math.inf:
            raise self._error(gap.at, f"gap_seconds: expected a number of seconds above 0, not {gap.value!r}")
        data = self._member(whole, "data", 0)
        if not isinstance(data.value, list) or not data.value:
            raise self._error(data.at, "data: expected a list of numbers of machines, not empty")
        entries = list(self._items(data.at))
        for index, value, at in entries:
            if type(value) not in (int, bool) or value < 0:
                raise self._error(
                    at, f"data[{index}]: expected how many machines are available, not {value!r}"
                )
        if not any(data.value):
            raise self._error(data.at, "data: no machine is ever available, so nobody can train")
        return SpotTrace(float(gap.value), tuple(map(int, data.value)))

    def _object(self, at: int, name: str) -> list[_Item]:
        if self._text[at : at + 1] != "{":
            raise self._error(at, f"{name}: expected an object, such as {{…}}")
        return list(self._items(at))

    def _member(self, items: list[_Item], key: str, at: int) -> _Item:
        found = [item for item in items if item.key == key]
        if not found:
            raise self._error(at, f"{key}: missing")
        return found[-1]  # of a key that comes twice the last one counts, as for json

    def _items(self, at: int) -> Iterator[_Item]:
        """Yield the members of the object, or the entries of the list, that begins here."""
        named = self._text[at] == "{"
        at, number = self._space(at + 1), 0
        while self._text[at] not in "}]":
            key: Any = number
            if named:
                key, at = self._decoder.raw_decode(self._text, at)
                at = self._space(self._space(at) + 1)  # behind the colon
            value, end = self._decoder.raw_decode(self._text, at)
            yield _Item(key, value, at)
            number += 1
            at = self._space(end)
            if self._text[at] == ",":
                at = self._space(at + 1)

    def _space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return found.end() if found else at

    def _error(self, at: int, problem: str) -> SettingError:
        return SettingError(f"{self._file}, line {self._text.count(chr(10), 0, at) + 1}: {problem}")
