"""Units of settings: rates as people write them."""

from __future__ import annotations

import math
import re

from offbeat.errors import SettingError

_BITS_PER_UNIT = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def parse_rate(text: str | int | float) -> float:
    """Return the bits per second of "1gbit", "2.5mbit", "100kbit", or of a plain number of bits."""
    rate = str(text).strip().lower()
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", rate)
    try:
        bits = float(found[1]) * _BITS_PER_UNIT[found[2]] if found else math.nan
    except (ValueError, KeyError):
        bits = math.nan
    if not 0.0 < bits < math.inf:
        units = ", ".join(unit for unit in _BITS_PER_UNIT if unit)
        raise SettingError(
            f"{text!r} is not a rate: give a number above 0 and a unit out of {units}, as in 100mbit or"
            " 2.5gbit (bits per second, powers of ten), or the number of bits per second alone"
        )
    return bits
