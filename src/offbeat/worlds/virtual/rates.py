"""Rates of links: a number of bits per second, one that changes over time, or one that workers draw.

{ between = [a, b] }        a worker's rate = a (b/a)^u,   u ∈ (0, 1) by its rank; no seed changes it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from offbeat.core.fields import Field
from offbeat.core.units import parse_rate
from offbeat.errors import SettingError
from offbeat.worlds.virtual.random_numbers import uniform

UP, DOWN = 0, 1  # the ways of a link, whose rates are drawn apart
_DRAWN = 1 << 34  # in the place of a step: numbers of step times stay their own


class ChangingRate(float):
    """A rate at the start of training, in bits per second, and its later `changes` with their times."""

    changes: tuple[tuple[float, float], ...]  # seconds from the start, and bits per second from then on

    def __new__(cls, first: float, changes: tuple[tuple[float, float], ...]) -> ChangingRate:
        rate = super().__new__(cls, first)
        rate.changes = changes
        return rate

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, ChangingRate) and self.changes == other.changes
        return same and float(self) == float(other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((float(self), self.changes))

    def __getnewargs__(self) -> tuple[float, tuple[tuple[float, float], ...]]:  # type: ignore[override]
        return float(self), self.changes


class DrawnRate(float):
    """Rates of a group of workers, in bits per second: each draws its own. As a number: the middle one."""

    least: float
    most: float

    def __new__(cls, least: float, most: float) -> DrawnRate:
        rate = super().__new__(cls, math.sqrt(least * most))
        rate.least, rate.most = least, most
        return rate

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.least, self.most

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DrawnRate) and (self.least, self.most) == (other.least, other.most)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.least, self.most))


def rate_of(rate: float, worker: int, way: int) -> float:
    """Return the rate of one worker's link."""
    if not isinstance(rate, DrawnRate):
        return rate
    drawn: float = rate.least * (rate.most / rate.least) ** uniform(way, worker, _DRAWN)
    return drawn


def changes_of(rate: float) -> tuple[tuple[float, float], ...]:
    """Return the later changes of a rate."""
    return rate.changes if isinstance(rate, ChangingRate) else ()


@dataclass(frozen=True)
class RateField(Field):
    """Bits per second: a number or a text with a unit, a list of them with their times, or their bounds."""

    drawn: bool = False  # whether there are several workers, who may draw theirs

    @property
    def expected(self) -> str:
        drawn = ', or the bounds of what workers draw, { between = ["20mbit", "300mbit"] }'
        return (
            'bits per second above 0, as in "1gbit" or 1e9, or a list of [from_s, rate] from 0 s on, '
            f'as in [[0, "1gbit"], [60, "100mbit"]]{drawn if self.drawn else ""}'
        )

    def read(self, value: Any) -> float:
        if isinstance(value, ChangingRate) or (self.drawn and isinstance(value, DrawnRate)):
            return value
        if isinstance(value, DrawnRate):
            raise self.refuse(self.plain(value))
        if isinstance(value, list | tuple):
            return self._read_changes(value)
        if isinstance(value, dict):
            return self._read_bounds(value)
        rate = _rate(value)
        if rate is None:
            raise self.refuse(value)
        return rate

    def _read_changes(self, value: Any) -> ChangingRate:
        rates: list[tuple[float, float]] = []
        for entry in value:
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                raise self.refuse(value)
            from_s, rate = entry[0], _rate(entry[1])
            if rate is None or isinstance(from_s, bool) or not isinstance(from_s, int | float):
                raise self.refuse(value)
            if not math.isfinite(from_s + rate) or not (from_s > rates[-1][0] if rates else from_s == 0):
                raise self.refuse(value)
            rates.append((float(from_s), rate))
        if not rates:
            raise self.refuse(value)
        return ChangingRate(rates[0][1], tuple(rates[1:]))

    def _read_bounds(self, value: dict[str, Any]) -> DrawnRate:
        bounds = value.get("between")
        if not self.drawn or len(value) != 1 or not isinstance(bounds, list | tuple) or len(bounds) != 2:
            raise self.refuse(value)
        least, most = map(_rate, bounds)
        if least is None or most is None or least >= most:
            raise self.refuse(value)
        return DrawnRate(least, most)

    def plain(self, value: float) -> Any:
        if isinstance(value, DrawnRate):
            return {"between": (_plain(value.least), _plain(value.most))}
        if isinstance(value, ChangingRate):
            rates = [(0.0, float(value)), *value.changes]
            return [[from_s, _plain(rate)] for from_s, rate in rates]
        return _plain(value)


def _rate(value: Any) -> float | None:
    """Return bits per second, or None if the value is none."""
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return parse_rate(value)
    except SettingError:
        pass
    return None


def _plain(value: float) -> str | float:
    for unit, bits in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if value >= bits and parse_rate(short := f"{value / bits:g}{unit}") == value:
            return short
    return value
