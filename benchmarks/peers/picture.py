"""A picture of the rows: seconds to the target at two rates, as bars in one SVG file."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from benchmarks.peers.cases import EQUAL, Cache, Outcome
from benchmarks.peers.contenders import CONTENDERS, OURS, PEER
from benchmarks.peers.results import GOAL_TASK, GOALS, final, rows, seconds

WIDTH, NAMES, BARS, LINE = 860, 190, 470, 22
SHOWN = 10  # rows at a rate: the soonest, and DDP in any case
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 } .title { font-weight: 600 } .small { fill: #666 }
.ours { fill: #2a6fb0 } .peer { fill: #9a9a9a }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .small { fill: #aaa } .ours { fill: #6aa9e4 }
.peer { fill: #777 } }
"""
TITLES = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s", "50mbit": "50 Mbit/s"}


def chosen(cache: Cache, rate: str) -> list[Outcome]:
    """The soonest first; who was cut short comes last, with what it took until then."""
    kinds = {PEER, OURS}
    there = [
        outcome
        for outcome in rows(cache)
        if (outcome.case.task, outcome.case.rate, outcome.case.workers) == (GOAL_TASK, rate, EQUAL)
        and CONTENDERS[outcome.case.contender].kind in kinds
        and outcome.history
    ]
    there.sort(key=lambda outcome: (seconds(outcome), outcome.history[-1].seconds))
    return [o for place, o in enumerate(there) if place < SHOWN or o.case.contender == "ddp"]


def bars(outcomes: list[Outcome], top: int) -> list[str]:
    longest = max(min(seconds(o), o.history[-1].seconds) for o in outcomes)
    drawn = []
    for number, outcome in enumerate(outcomes):
        y, took = top + number * LINE, seconds(outcome)
        there = took < math.inf
        shown = took if there else outcome.history[-1].seconds
        width = max(2.0, BARS * shown / longest)
        kind = CONTENDERS[outcome.case.contender].kind
        faint = "" if there else ' opacity="0.45"'
        said = f"{took:.1f} s" if there else f"not in {shown:.0f} s"
        drawn += [
            f'<text x="{NAMES - 10}" y="{y + 14}" text-anchor="end">{escape(outcome.case.contender)}</text>',
            f'<rect class="{kind}" x="{NAMES}" y="{y + 2}" width="{width:.1f}" height="{LINE - 6}"{faint}/>',
            f'<text class="small" x="{NAMES + width + 8:.1f}" y="{y + 14}">{said}, ends at'
            f" {100 * (final(outcome) or 0.0):.1f}%</text>",
        ]
    return drawn


def picture(cache: Cache) -> str:
    parts, y = [], 10
    for rate in GOALS:
        outcomes = chosen(cache, rate)
        if outcomes:
            title = f"{TITLES[rate]}: seconds of training to 87% on Fashion-MNIST, 4 workers"
            parts.append(f'<text class="title" x="10" y="{y + 14}">{title}</text>')
            parts += bars(outcomes, y + LINE)
            y += (len(outcomes) + 2) * LINE
    parts.append(f'<rect class="ours" x="10" y="{y}" width="12" height="12"/>')
    parts.append(f'<text class="small" x="28" y="{y + 11}">Offbeat</text>')
    parts.append(f'<rect class="peer" x="100" y="{y}" width="12" height="12"/>')
    parts.append(f'<text class="small" x="118" y="{y + 11}">torch, torchft, Accelerate</text>')
    size = f'viewBox="0 0 {WIDTH} {y + 24}" width="{WIDTH}" height="{y + 24}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def draw(cache: Cache, path: Path) -> None:
    path.write_text(picture(cache))
    print(f"written: {path}")
