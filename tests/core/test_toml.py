"""TOML: settings that are written read back equal, and an error names the file and the line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.fields import Number, Text, Whole
from offbeat.core.settings import Settings
from offbeat.core.toml import line_of, read_toml, to_value, write_toml
from offbeat.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Link(Settings):
    rate: Annotated[float, Number("bits per second", above=0)] = 1.0
    label: Annotated[str, Text("its name")] = ""
    hops: Annotated[int | None, Whole("hops", at_least=1)] = None


links = st.builds(
    Link,
    rate=st.floats(1e-9, 1e12),
    label=st.text(),
    hops=st.none() | st.integers(1, 10**9),
)


@given(links)
def test_what_is_written_reads_back_equal(link: Link) -> None:
    assert read_toml(Link, write_toml(link), "link.toml") == link


def test_fields_at_their_defaults_are_left_out() -> None:
    assert write_toml(Link()) == ""
    assert write_toml(Link(label="a", rate=2.5)) == 'rate = 2.5\nlabel = "a"\n'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, '"none"'),
        (True, "true"),
        (7, "7"),
        (1e-9, "1e-09"),
        ('a "b"\n', '"a \\"b\\"\\n"'),
        ((1, "x"), '[1, "x"]'),
        ({"a": 1, "b": (True,)}, "{ a = 1, b = [true] }"),
        ({}, "{}"),
        (Link(rate=2.0), "{ rate = 2.0 }"),
    ],
    ids=str,
)
def test_values_by_hand(value: object, text: str) -> None:
    assert to_value(value) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("label = 'a'\n\nrate = -1\n", r"mine.toml, line 3: rate: expected a number above 0, not -1"),
        ("# rate = 1\nrats = 1.0\n", r"mine.toml, line 2: .*rats"),
        ("rate = \n", r"mine.toml, line 1: not TOML: "),
        ("rate = 1\nlabel = 'a", r"mine.toml, line 2: not TOML: "),
    ],
)
def test_an_error_names_the_file_and_the_line(source: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_toml(Link, source, "mine.toml")


SOURCE = '''name = "x # no = comment"
text = """
rate = 1
"""
list = [
  1,
]
[server]
rate = 2
[[workers]]
count = 1
[[workers]]
count = 2
[workers.link]
rate.up = 3
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("name",), 1),
        (("list",), 5),
        (("list", 0), 5),
        (("server",), 8),
        (("server", "rate"), 9),
        (("workers", 0, "count"), 11),
        (("workers", 1), 12),
        (("workers", 1, "count"), 13),
        (("workers", 1, "link", "rate", "up"), 15),
        (("workers", 1, "link", "delay"), 14),
        (("rate",), 1),
    ],
    ids=str,
)
def test_lines_of_fields(path: tuple[str | int, ...], line: int) -> None:
    assert line_of(path, SOURCE) == line
