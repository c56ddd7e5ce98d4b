"""Bar chart of the table's rows as SVG: seconds to the target at two rates, and with a straggler.

    python -m benchmarks.peers.chart benchmarks/results/peers/DATE.md docs/peers.svg   draws a table again

A thin line over a bar reaches from the fastest seed to the slowest; a bar without one is a single seed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.cases import EQUAL, STRAGGLER
from benchmarks.peers.contenders import CONTENDERS, OURS, PEER
from benchmarks.peers.results import GOAL_TASK, GOALS

WIDTH, NAMES, BARS, LINE = 860, 200, 430, 22
SHOWN = 10  # rows per panel: the fastest, and always DDP
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 } .title { font-weight: 600 } .small { fill: #666 }
.own { font-weight: 600 } .ours { fill: #2a6fb0 } .peer { fill: #9a9a9a }
.range { stroke: #222; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .small { fill: #aaa } .ours { fill: #6aa9e4 }
.peer { fill: #777 } .range { stroke: #eee } }
"""
RATES = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
WORKERS = {EQUAL: "4 workers", STRAGGLER: "4 workers, one of them 4x slower"}
PANELS = [*((rate, EQUAL) for rate in GOALS), ("1gbit", STRAGGLER)]
WORDS = {
    "ddp": "torch DDP",
    "ddp_fp16": "torch DDP, 16 bits",
    "post_local_sgd": "torch PostLocalSGD",
    "torchft_local_sgd": "torchft LocalSGD",
    "torchft_diloco": "torchft DiLoCo",
    "accelerate_local_sgd": "Accelerate LocalSGD",
    "local_sgd": "LocalSGD",
    "local_sgd+quantize": "LocalSGD, 8 bits",
    "diloco": "DiLoCo",
    "diloco+average": "DiLoCo, averaged",
    "diloco+4bit": "DiLoCo, 4 bits",
    "diloco+4bit+average": "DiLoCo, averaged, 4 bits",
    "selsync": "SelSync",
    "oscars": "Oscars",
    "oscars+busy": "Oscars, busy=0.8",
    "ssd_sgd": "SSD-SGD",
}


class Bar(NamedTuple):
    """A contender's seconds to the target with each seed; infinite if it missed it within `limit_s`."""

    contender: str
    mean: float
    seconds: tuple[float, ...]
    limit_s: float
    final: float

    @property
    def missed(self) -> bool:
        return self.mean == math.inf

    @property
    def shown(self) -> float:
        return self.limit_s if self.missed else self.mean

    @property
    def longest(self) -> float:
        return self.limit_s if self.missed else max(self.seconds)

    @property
    def label(self) -> str:
        if self.missed:
            return f"not in {self.limit_s:.0f} s"
        spread = f" ({min(self.seconds):.1f} to {max(self.seconds):.1f})" if len(self.seconds) > 1 else ""
        return f"{self.mean:.1f} s{spread}"


def read_bar(cells: Sequence[str]) -> Bar | None:
    """Read a row of the table; None if it has no result, or is no contender."""
    contender, told, final = cells[3], cells[5], cells[6]
    if contender not in CONTENDERS or CONTENDERS[contender].kind not in (OURS, PEER) or final == "–":
        return None
    missed = re.match(r"not in (\d+)", told)
    if missed:
        return Bar(contender, math.inf, (math.inf,), float(missed[1]), float(final))
    mean, _, seeds = told.rstrip(")").partition(" (")
    each = tuple(map(float, (seeds or mean).split(", ")))
    return Bar(contender, float(mean), each, max(each), float(final))


def select_bars(table: Iterable[Sequence[str]], rate: str, workers: str) -> list[Bar]:
    """Select the bars of a panel, the fastest first; trainings that missed the target come last."""
    found = [read_bar(cells) for cells in table if tuple(cells[:3]) == (GOAL_TASK, rate, workers)]
    bars = sorted((bar for bar in found if bar), key=lambda bar: (bar.mean, bar.limit_s))
    return [bar for place, bar in enumerate(bars) if place < SHOWN or bar.contender == "ddp"]


def draw_bars(bars: list[Bar], top: int) -> list[str]:
    """Draw one bar per contender; a faint one if it missed the target."""
    scale = BARS / max(bar.longest for bar in bars)
    drawn = []
    for number, bar in enumerate(bars):
        y, own = top + number * LINE, CONTENDERS[bar.contender].kind == OURS
        name = escape(WORDS.get(bar.contender, bar.contender.upper()))
        bold, faint = ' class="own"' if own else "", ' opacity="0.45"' if bar.missed else ""
        shape = f'x="{NAMES}" y="{y + 2}" width="{max(2.0, scale * bar.shown):.1f}" height="{LINE - 6}"'
        drawn.append(f'<text{bold} x="{NAMES - 10}" y="{y + 14}" text-anchor="end">{name}</text>')
        drawn.append(f'<rect class="{OURS if own else PEER}" {shape}{faint}/>')
        if len(bar.seconds) > 1:
            first, last = (f"{NAMES + scale * end:.1f}" for end in (min(bar.seconds), max(bar.seconds)))
            line = f"M{first} {y + 6}v8M{first} {y + 10}H{last}M{last} {y + 6}v8"
            drawn.append(f'<path class="range" d="{line}"/>')
        end = NAMES + scale * bar.longest + 8
        text = f"{bar.label}, ends at {100 * bar.final:.1f}%"
        drawn.append(f'<text class="small" x="{end:.1f}" y="{y + 14}">{text}</text>')
    return drawn


def render_chart(table: Sequence[Sequence[str]]) -> str:
    """Render all panels as one SVG document, from the cells of the table's rows."""
    parts = [
        '<rect class="ours" x="10" y="8" width="12" height="12"/>',
        '<text class="small" x="28" y="19">Offbeat</text>',
        '<rect class="peer" x="100" y="8" width="12" height="12"/>',
        '<text class="small" x="118" y="19">torch, torchft, Accelerate</text>',
        '<path class="range" d="M310 10v8M310 14H340M340 10v8"/>',
        '<text class="small" x="348" y="19">fastest to slowest of six seeds; without it, one seed</text>',
    ]
    y = 36
    for rate, workers in PANELS:
        panel = select_bars(table, rate, workers)
        if panel:
            title = f"{RATES[rate]}: seconds of training to 87% on Fashion-MNIST, {WORKERS[workers]}"
            parts.append(f'<text class="title" x="10" y="{y + 14}">{title}</text>')
            parts += draw_bars(panel, y + LINE)
            y += (len(panel) + 2) * LINE
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def read_table(text: str) -> list[list[str]]:
    """Read the cells of a written table."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {GOAL_TASK} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def write_chart(table: Sequence[Sequence[str]], path: Path) -> None:
    """Write the chart to a file."""
    path.write_text(render_chart(table))
    print(f"written: {path}")


if __name__ == "__main__":
    write_chart(read_table(Path(sys.argv[1]).read_text("utf-8")), Path(sys.argv[2]))
