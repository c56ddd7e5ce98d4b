"""Units as people write them: rates of bits, seconds, and sizes in bytes."""

from __future__ import annotations

import math
import re

from offbeat.errors import SettingError

_BITS_PER_UNIT = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def parse_rate(rate: str | float) -> float:
    """Return the bits per second of "1gbit", "2.5mbit", "100kbit", or of a plain number of them."""
    text = str(rate).strip().lower()
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", text)
    try:
        bits = float(found[1]) * _BITS_PER_UNIT[found[2]] if found else math.nan
    except (ValueError, KeyError):
        bits = math.nan
    if not 0.0 < bits < math.inf:
        units = ", ".join(unit for unit in _BITS_PER_UNIT if unit)
        raise SettingError(
            f"{rate!r} is not a rate: give a number above 0 and a unit ({units}), as in 100mbit or"
            " 2.5gbit (bits per second, powers of ten), or the number of bits per second alone"
        )
    return bits


_SECONDS_PER_UNIT = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str) -> float:
    """Return the seconds of "40ms", "0.5s", "0.5", "5min", "2h" or "1d"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]*)", text.strip())
    if not match or float(match[1]) <= 0 or match[2] not in _SECONDS_PER_UNIT:
        raise SettingError(f"{text!r}: write a time above 0, such as 40ms or 0.5s, 5min or 2h")
    return float(match[1]) * _SECONDS_PER_UNIT[match[2]]


_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def size_unit(nbytes: float) -> tuple[str, float]:
    """Return the unit in which a number of bytes has one to three digits before the point, and its bytes."""
    name = next((unit for unit, each in _SIZES.items() if nbytes < 999.5 * each), "TB")
    return name, _SIZES[name]


def size(nbytes: float) -> str:
    """Write a number of bytes with three digits and a unit: "1.25 MB"."""
    unit, each = size_unit(nbytes)
    return f"{nbytes / each:.3g} {unit}"


def percent(fraction: float) -> str:
    """Write a fraction as whole percent; halves are rounded up, as on the report's page."""
    return f"{math.floor(100 * fraction + 0.5)}%"
