"""Bar chart of the rows as SVG: seconds to the target at two rates, and with a straggler."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from benchmarks.peers.cases import EQUAL, STRAGGLER, Cache
from benchmarks.peers.contenders import CONTENDERS, OURS, PEER
from benchmarks.peers.results import GOAL_TASK, GOALS, Row, rows

WIDTH, NAMES, BARS, LINE = 860, 190, 470, 22
SHOWN = 10  # rows per panel: the fastest, and always DDP
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 } .title { font-weight: 600 } .small { fill: #666 }
.ours { fill: #2a6fb0 } .peer { fill: #9a9a9a }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .small { fill: #aaa } .ours { fill: #6aa9e4 }
.peer { fill: #777 } }
"""
RATES = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
WORKERS = {EQUAL: "4 workers", STRAGGLER: "4 workers, one of them 4x slower"}
PANELS = [*((rate, EQUAL) for rate in GOALS), ("1gbit", STRAGGLER)]


def select_rows(cache: Cache, rate: str, workers: str) -> list[Row]:
    """Select the rows of a panel, the fastest first; trainings that missed the target come last."""
    kinds = {PEER, OURS}
    selected = [
        row
        for row in rows(cache)
        if (row.case.task, row.case.rate, row.case.workers) == (GOAL_TASK, rate, workers)
        and CONTENDERS[row.case.contender].kind in kinds
        and row.final is not None
    ]
    selected.sort(key=lambda row: (row.seconds, row.shortest_s))
    return [row for place, row in enumerate(selected) if place < SHOWN or row.case.contender == "ddp"]


def bars(rows: list[Row], top: int) -> list[str]:
    """Draw one bar per row; a faint one if the target was missed."""
    longest = max(min(row.seconds, row.shortest_s) for row in rows)
    drawn = []
    for number, row in enumerate(rows):
        y, reached = top + number * LINE, row.seconds < math.inf
        shown = row.seconds if reached else row.shortest_s
        width = max(2.0, BARS * shown / longest)
        kind = CONTENDERS[row.case.contender].kind
        faint = "" if reached else ' opacity="0.45"'
        label = f"{shown:.1f} s" if reached else f"not in {shown:.0f} s"
        drawn += [
            f'<text x="{NAMES - 10}" y="{y + 14}" text-anchor="end">{escape(row.case.contender)}</text>',
            f'<rect class="{kind}" x="{NAMES}" y="{y + 2}" width="{width:.1f}" height="{LINE - 6}"{faint}/>',
            f'<text class="small" x="{NAMES + width + 8:.1f}" y="{y + 14}">{label}, ends at'
            f" {100 * (row.final or 0.0):.1f}%</text>",
        ]
    return drawn


def render_chart(cache: Cache) -> str:
    """Render all panels as one SVG document."""
    parts, y = [], 10
    for rate, workers in PANELS:
        panel = select_rows(cache, rate, workers)
        if panel:
            title = f"{RATES[rate]}: seconds of training to 87% on Fashion-MNIST, {WORKERS[workers]}"
            parts.append(f'<text class="title" x="10" y="{y + 14}">{title}</text>')
            parts += bars(panel, y + LINE)
            y += (len(panel) + 2) * LINE
    parts.append(f'<rect class="ours" x="10" y="{y}" width="12" height="12"/>')
    parts.append(f'<text class="small" x="28" y="{y + 11}">Offbeat</text>')
    parts.append(f'<rect class="peer" x="100" y="{y}" width="12" height="12"/>')
    parts.append(f'<text class="small" x="118" y="{y + 11}">torch, torchft, Accelerate</text>')
    size = f'viewBox="0 0 {WIDTH} {y + 24}" width="{WIDTH}" height="{y + 24}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def write_chart(cache: Cache, path: Path) -> None:
    """Write the chart to a file."""
    path.write_text(render_chart(cache))
    print(f"written: {path}")
