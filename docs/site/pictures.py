"""Pictures of the strategies: who computes, waits and sends when, from runs in virtual time.

    python docs/site/pictures.py      writes docs/strategies/NAME.svg

Strategies that save communication are shown on a slow network: an all-reduce of the model takes 1.2 steps.
Those that save waiting for workers are shown on a fast one, with a worker that takes 2.5 times as long.
tests/test_strategy_pages.py makes the pictures anew, and compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import offbeat
from offbeat.core.ledger import Ledger, Span
from offbeat.experiments.timeline import parts
from offbeat.worlds.virtual.cluster import Cluster, Workers
from offbeat.worlds.virtual.session import VirtualSession
from offbeat.worlds.virtual.simulation import run_workers

FOLDER = Path(__file__).resolve().parents[1] / "strategies"
LAYERS, LAYER_SIZE = 12, 1 << 16
MODEL_BYTES = 4 * LAYERS * LAYER_SIZE
SHOWN_S = 13.0
SHORTEST_S = 0.01  # what is shorter is not drawn
STEPS = 14


class Setting(NamedTuple):
    """Three workers and their network; seconds are steps of the fastest worker."""

    step_s: tuple[float, ...]
    all_reduce_s: float


SLOW_NETWORK = Setting((1.0, 1.0, 1.1), 1.2)
SLOW_WORKER = Setting((1.0, 1.0, 2.5), 0.15)

# Settings of the strategies that fit into a small picture.
SCENES: dict[str, tuple[offbeat.Strategy[Any], Setting]] = {
    "bsp": (offbeat.BSP(), SLOW_NETWORK),
    "local_sgd": (offbeat.LocalSGD(period=4), SLOW_NETWORK),
    "diloco": (offbeat.DiLoCo(period=4, fragments=2, delay=1), SLOW_NETWORK),
    "sparse_loco": (offbeat.SparseLoCo(period=4), SLOW_NETWORK),
    "selsync": (offbeat.SelSync(window=2), SLOW_NETWORK),
    "osp": (offbeat.OSP(budget=0.5, growth=0), SLOW_NETWORK),
    "ssd_sgd": (offbeat.SSDSGD(delay=3, warmup=1), SLOW_NETWORK),
    "asp": (offbeat.ASP(), SLOW_WORKER),
    "ssp": (offbeat.SSP(staleness=2), SLOW_WORKER),
    "dssp": (offbeat.DSSP(low=1, high=4), SLOW_WORKER),
    "gssp": (offbeat.GSSP(staleness=1, window=2), SLOW_WORKER),
    "oscars": (offbeat.Oscars(tau=2), SLOW_WORKER),
    "auto": (offbeat.Auto(window=2, gain=0.05, longest=4), SLOW_NETWORK),
}


def timeline(strategy: offbeat.Strategy[Any], setting: Setting) -> list[list[Span]]:
    """Run a strategy in virtual time, and return the spans of each worker."""
    size = len(setting.step_s)
    link = 8 * 2 * (size - 1) / size * MODEL_BYTES / setting.all_reduce_s
    each = [Workers(step_s=s, up_bits_per_s=link, down_bits_per_s=link) for s in setting.step_s]
    ledgers: list[Ledger] = []

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(LAYER_SIZE)) for _ in range(LAYERS)])
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def gradient(model: nn.Module, step: int) -> Tensor:
        size = 4.0 if step % 5 == 4 else 1.0  # gradients that change now and then, for SelSync
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, size * (1 + number))
        return torch.zeros(())

    def on_start(sessions: list[VirtualSession]) -> None:
        for session in sessions:
            session.ledger.spans = []
            ledgers.append(session.ledger)

    async def train(session: VirtualSession) -> None:
        for step in range(STEPS):
            await session.backward(step, samples=1)
            await session.update()

    cluster = Cluster(workers=tuple(each))
    run_workers(size, cluster, strategy, build, gradient, train, on_start=on_start)
    return [list(ledger.spans or ()) for ledger in ledgers]


# --- drawing

SCALE, LEFT, ROW, BAR, LINE = 48.0, 78.0, 62.0, 22.0, 7.0
COLOURS = {
    "forward": ("#7fb3e6", "forward"),
    "backward": ("#3f7fbf", "backward"),
    "computing": ("#8a8f98", "optimizer and other"),
    "waiting": ("#d9a441", "waits"),
    "front": ("#c2543d", "exchange, awaited"),
    "back": ("#7a5bb0", "exchange in the background"),
    "push": ("#2f8f6b", "push to the server"),
    "pull": ("#8fbf4d", "pull from the server"),
}
LINES = ("front", "back", "push", "pull")  # thin ones, below the worker's bar


def draw(name: str, workers: list[list[Span]]) -> str:
    """Return the picture of a timeline as SVG."""
    shapes: list[str] = []
    used: set[str] = set()
    for rank, spans in enumerate(workers):
        top = 14 + rank * ROW
        shapes.append(f'<text x="4" y="{top + 15:g}">worker {rank}</text>')
        for kind, start, end in _bars(spans):
            used.add(kind)
            thin = kind in LINES
            place = top + BAR + 3 + (LINE + 1) * (LINES.index(kind) % 2) if thin else top
            shapes.append(_bar(start, min(end, SHOWN_S), place, LINE if thin else BAR, COLOURS[kind][0]))
    bottom = 14 + len(workers) * ROW
    for second in range(int(SHOWN_S) + 1):
        x = LEFT + second * SCALE
        shapes.append(f'<path d="M{x:g} {bottom - 14:g}v5" stroke="#888"/>')
        shapes.append(f'<text x="{x:g}" y="{bottom + 4:g}" text-anchor="middle">{second}</text>')
    width, height = LEFT + SHOWN_S * SCALE + 12, bottom + 44
    shapes += _legend([kind for kind in COLOURS if kind in used], bottom + 20)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
    style = "<style>text{font:12px sans-serif;fill:#888}</style>"
    title = f"<title>{name}: what three workers do, over time in steps of a fast worker</title>"
    return "\n".join([f'{head} font-size="12">', title, style, *shapes, "</svg>", ""])


def _bars(spans: list[Span]) -> list[tuple[str, float, float]]:
    """Return kind, start and end of what is drawn of a worker; what follows on itself is one bar."""
    bars: dict[str, list[tuple[float, float]]] = {}
    for part in sorted(parts(spans), key=lambda part: part.start_s):
        kind = part.name if part.kind == "computing" and part.name else part.kind
        if kind not in COLOURS or part.start_s >= SHOWN_S or part.end_s - part.start_s < SHORTEST_S:
            continue
        of_kind = bars.setdefault(kind, [])
        if of_kind and part.start_s <= of_kind[-1][1] + SHORTEST_S and kind not in ("push", "pull"):
            of_kind[-1] = (of_kind[-1][0], max(of_kind[-1][1], part.end_s))
        else:
            of_kind.append((part.start_s, part.end_s))
    return [(kind, *bar) for kind, of_kind in bars.items() for bar in of_kind]


def _bar(start: float, end: float, top: float, height: float, colour: str) -> str:
    x, width = LEFT + start * SCALE, max((end - start) * SCALE, 1.0)
    return f'<rect x="{x:.1f}" y="{top:g}" width="{width:.1f}" height="{height:g}" fill="{colour}"/>'


def _legend(kinds: list[str], top: float) -> list[str]:
    shapes, x = [], LEFT
    for kind in kinds:
        colour, words = COLOURS[kind]
        shapes.append(f'<rect x="{x:g}" y="{top:g}" width="10" height="10" fill="{colour}"/>')
        shapes.append(f'<text x="{x + 14:g}" y="{top + 9:g}">{words}</text>')
        x += 30 + 6.2 * len(words)
    return shapes


def picture(name: str) -> str:
    """Return the picture of a strategy."""
    return draw(name, timeline(*SCENES[name]))


if __name__ == "__main__":
    for name in SCENES:
        (FOLDER / f"{name}.svg").write_text(picture(name), encoding="utf-8")
