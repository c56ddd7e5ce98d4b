"""Units as people write them: rates of bits, seconds, and sizes in bytes."""

from __future__ import annotations

import pytest

from offbeat.core.units import parse_rate, percent, seconds_of, size
from offbeat.errors import SettingError


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("1gbit", 1e9), ("2.5 Mbit", 2.5e6), ("100kbit", 1e5), ("1e3bit", 1e3), ("3tbit", 3e12), (8e6, 8e6)],
)
def test_rates_are_in_bits_and_powers_of_ten(rate: str | float, bits: float) -> None:
    assert parse_rate(rate) == bits


@pytest.mark.parametrize(
    "rate", ["", "fast", "1 gib", "0gbit", "-1gbit", "1.2.3mbit", "inf", 0, float("nan")]
)
def test_other_rates_are_refused_with_an_example(rate: str | float) -> None:
    with pytest.raises(SettingError, match=r"is not a rate: .* as in 100mbit or 2.5gbit"):
        parse_rate(rate)


@pytest.mark.parametrize(
    ("text", "seconds"), [("40ms", 0.04), ("0.5s", 0.5), (" 2 ", 2.0), ("1.5ms", 0.0015)]
)
def test_seconds(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize("text", ["", "0", "0ms", "-1s", "1 min", "1e3", "ms"])
def test_other_times_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingError, match=r"write a time above 0, such as 40ms or 0.5s"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1_250_000, "1.25 MB"),
        (3e9, "3 GB"),
        (1.234e12, "1.23 TB"),
        (5e15, "5e+03 TB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(("fraction", "text"), [(0, "0%"), (0.125, "13%"), (0.0049, "0%"), (1, "100%")])
def test_percent_rounds_halves_up_as_the_page_does(fraction: float, text: str) -> None:
    assert percent(fraction) == text
