"""Parts of a benchmark that run at the same time, each as a command of its own: `--part 2/3`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn, TypeVar

T = TypeVar("T")


class Part(NamedTuple):
    """One of `count` parts; the first has the number 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read "2/3"; anything else is an error of the command line."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"{text!r}: a part is K/N, such as 2/3, with K from 1 to N")
        return cls(int(number), int(count))

    def of(self, units: Sequence[T], cost: Callable[[T], float]) -> list[T]:
        """Return this part's units, in their order; all parts together have each unit once.

        The most expensive unit comes first, and each goes to the part that has least to do.
        """
        shares: list[list[int]] = [[] for _ in range(self.count)]
        loads = [0.0] * self.count
        for place in sorted(range(len(units)), key=lambda place: -cost(units[place])):
            least = loads.index(min(loads))
            shares[least].append(place)
            loads[least] += cost(units[place])
        return [units[place] for place in sorted(shares[self.number - 1])]


WHOLE = Part(1, 1)


def add_part_option(parser: argparse.ArgumentParser, unit: str) -> None:
    """Add `--part K/N`; by default everything is run."""
    parser.add_argument(
        "--part",
        type=Part.parse,
        default=WHOLE,
        metavar="K/N",
        help=f"run only the K-th of N parts of the {unit}; N commands can run at the same time",
    )


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the program as an exception does, so that emulated hosts are removed."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
