"""The candidates that `offbeat plan` tries, in this order. BSP comes first: it is the baseline.

The table is for 4 workers. For others, a server's quorum is the same fraction of them. Plugins come last,
each with its default settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from offbeat.codecs import Codec, ErrorFeedback, Half, PowerSGD, Quantize, TopK
from offbeat.core.settings import build, lookup
from offbeat.core.strategy import Strategy
from offbeat.strategies import STRATEGIES
from offbeat.strategies.asp import ASP
from offbeat.strategies.auto import Auto
from offbeat.strategies.bsp import BSP
from offbeat.strategies.diloco import DiLoCo
from offbeat.strategies.dssp import DSSP
from offbeat.strategies.gssp import GSSP
from offbeat.strategies.gssp.gdtopk import GDTopK
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.oscars import Oscars
from offbeat.strategies.osp import OSP
from offbeat.strategies.selsync import SelSync
from offbeat.strategies.sparse_loco import SparseLoCo
from offbeat.strategies.ssd_sgd import SSDSGD
from offbeat.strategies.ssp import SSP
from offbeat.worlds.virtual.cluster import Cluster

CANDIDATES: tuple[Strategy[Any], ...] = (
    BSP(),
    BSP(codec=Half()),
    BSP(codec=ErrorFeedback(Quantize(4))),
    BSP(codec=ErrorFeedback(TopK(0.01))),
    BSP(codec=ErrorFeedback(PowerSGD(4))),
    LocalSGD(period=2),
    LocalSGD(period=4),
    LocalSGD(period=8),
    LocalSGD(period=16),
    LocalSGD(period=32),
    LocalSGD(period=4, codec=ErrorFeedback(Quantize(4))),
    SelSync(delta=0.1),
    SelSync(delta=0.3),
    OSP(growth=20),  # the defaults of these two warm up for longer than a short run lasts
    SSDSGD(delay=5, warmup=20),  # by the carried rule, its default
    DiLoCo(period=16),
    DiLoCo(period=32),
    DiLoCo(period=16, average=0.7),
    DiLoCo(period=32, average=0.7),
    DiLoCo(period=16, average=0.7, codec=ErrorFeedback(Quantize(4))),
    DiLoCo(period=16, average=0.7, fragments=4, delay=2),
    DiLoCo(period=16, eager=True),
    DiLoCo(period=16, on="server", quorum=3),
    SparseLoCo(period=16),
    ASP(),
    SSP(),
    DSSP(),
    GSSP(),
    GSSP(sparse=GDTopK()),  # with its floor of 0.05
    Oscars(),
    Oscars(tau=8),
    Oscars(busy=0.5),
    Oscars(busy=0.8),
    Auto(),
)


WORKERS = 4  # that the table is for


def candidates(names: Sequence[str] | None = None, workers: int = WORKERS) -> tuple[Strategy[Any], ...]:
    """Return all candidates, or BSP and the candidates of the named strategies."""
    if names is None:
        classes = STRATEGIES.load()[0]
    else:
        classes = {name: lookup("strategy", name, STRATEGIES) for name in names}
    plugins = (build(cls, {}) for name, cls in classes.items() if name not in STRATEGIES.own)
    own = (_for_workers(c, workers) for c in CANDIDATES if c.name in classes or c == BSP())
    return (*own, *plugins)


def _for_workers(candidate: Strategy[Any], workers: int) -> Strategy[Any]:
    """Return the candidate with the same fraction of the workers as its quorum."""
    if not isinstance(candidate, DiLoCo) or candidate.quorum is None:
        return candidate
    return replace(candidate, quorum=max(1, round(candidate.quorum * workers / WORKERS)))


def untimed(strategies: Iterable[Strategy[Any]], cluster: Cluster) -> str:
    """Name in words what these strategies compute beside their steps and the cluster has no times of."""
    strategies = list(strategies)
    timed = {cost.codec for cost in cluster.codecs}
    codecs = any(str(codec) not in timed for codec in codecs_of(strategies))
    servers = cluster.shards is None and any(s.server_half() is not None for s in strategies)
    return " and ".join(["codecs"] * codecs + ["servers"] * servers)


def codecs_of(strategies: Iterable[Strategy[Any]]) -> list[Codec]:
    """Return the codecs of these strategies, each once."""
    found: dict[str, Codec] = {}
    for strategy in strategies:
        half = strategy.server_half()
        own = getattr(strategy, "codec", None)
        codecs = [own] if own is not None else [] if half is None else half.push_codecs
        found |= {str(codec): codec for codec in codecs}
    return list(found.values())
