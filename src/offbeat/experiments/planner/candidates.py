"""The candidates that `offbeat plan` tries, in this order. BSP comes first: it is the baseline.

The table is for 4 workers. For others, a server's quorum is the same fraction of them. Plugins come last,
each with its default settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

# Each candidate costs a trial, which takes as long as training on one machine. So a setting gets a candidate
# if it was better than its default in some measurement (docs/strategies), or changes what is exchanged, with
# whom or when; other settings are in LEFT_OUT with the reason.
CANDIDATES: tuple[Strategy[Any], ...] = (
    # An exchange at every step, and one codec of each kind: half, fewer bits, fewer entries, lower rank.
    BSP(),
    BSP(codec=Half()),
    BSP(codec=ErrorFeedback(Quantize(4))),
    BSP(codec=ErrorFeedback(TopK(0.01))),
    BSP(codec=ErrorFeedback(PowerSGD(4))),
    # The period decides between bytes and accuracy, so it is tried most finely. On slow links 8 bits with a
    # long period were soonest (docs/peers.md). The periods of the moments are DES-LOC's.
    LocalSGD(period=2),
    LocalSGD(period=4),
    LocalSGD(period=8),
    LocalSGD(period=16),
    LocalSGD(period=32),
    LocalSGD(period=4, codec=ErrorFeedback(Quantize(4))),
    LocalSGD(period=32, codec=ErrorFeedback(Quantize(8))),
    LocalSGD(period=8, first_moments=24, second_moments=48),
    # The good delta depends on model, batch and workers, from 0.02 to 0.3. On fast links the flag at every
    # step is what remains: it is sent less often, or hidden.
    SelSync(delta=0.1),
    SelSync(delta=0.3),
    SelSync(delta=0.12, period=8),
    SelSync(delta=0.02, period=8),
    SelSync(delta=0.2, late=True),
    # The default growth lasts longer than a short run. Either averages through a server, too, which is faster
    # where that has the better links; a codec shortens what is late.
    OSP(growth=20),
    OSP(growth=20, codec=ErrorFeedback(TopK(0.1))),
    OSP(growth=20, on="server"),
    SSDSGD(delay=5, warmup=20),  # by the carried rule, its default
    SSDSGD(delay=5, warmup=20, on="server"),
    # Published means, a smaller momentum, streaming, eager updates, and a server that does not wait for all.
    DiLoCo(period=16),
    DiLoCo(period=32),
    DiLoCo(period=16, outer_momentum=0.5),
    DiLoCo(period=16, average=0.7),
    DiLoCo(period=32, average=0.7),
    DiLoCo(period=16, average=0.7, codec=ErrorFeedback(Quantize(4))),
    DiLoCo(period=16, average=0.7, fragments=4, delay=2),
    DiLoCo(period=16, eager=True),
    DiLoCo(period=16, on="server", quorum=3),
    # The fewest bytes: its default period, more entries, and an exchange behind computation.
    SparseLoCo(period=16),
    SparseLoCo(period=32),
    SparseLoCo(period=32, ratio=0.1),
    SparseLoCo(period=16, delay=4),
    # Push and pull at every step, for workers of different speed; pushes are encoded, pulls are not.
    ASP(),
    ASP(codec=ErrorFeedback(TopK(0.01))),
    SSP(),
    SSP(codec=ErrorFeedback(Quantize(4))),
    DSSP(),
    GSSP(),
    GSSP(sparse=GDTopK()),  # with its floor of 0.05
    # Rounds for workers of different speed; longer ones where an exchange takes long, or late in training.
    Oscars(),
    Oscars(tau=8),
    Oscars(busy=0.5),
    Oscars(busy=0.8),
    Oscars(busy=0.8, schedule="lengthen"),
    Auto(),
)

_OF_PUSHES = {
    "push": "auto chooses by the optimizer",
    "overlap": "hides pulls where the bound allows it; without it a step only takes longer",
}
_CODEC_OF_ASP = "tried with ASP and SSP, whose pushes are the same"

LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "local_sgd": {"weighted": "workers of a plan have equal batches, so all have the same weight"},
    "selsync": {
        "aggregate": "averaged gradients were worse than averaged weights, and replicas never agree again",
        "window": "the paper's 25, to which the measured deltas belong",
        "smoothing": "follows the number of workers; delta decides the same",
    },
    "osp": {
        "budget": "auto measures it",
        "importance": "the paper's; the others are for comparison",
        "correction": "lgp was best under momentum",
        "mix": "of ema-lgp only",
    },
    "ssd_sgd": {
        "delay": "5 is the longest that is recommended, and traffic falls little with it",
        "warmup": "20 steps are its default, and short already",
        "rule": "the authors' rule is for comparison with their paper",
        "alpha": "of the authors' rule only",
        "beta": "of the authors' rule only",
        "scaling": "of the authors' rule only",
        "staggered": "None staggers where possible",
    },
    "diloco": {
        "outer_lr": "0.7 was best or nearly so with averages; outer_momentum is tried instead",
        "mix": "slower than a delay without it",
        "outlier_norm": "against faulty workers, of which a plan has none",
        "outlier_cosine": "against faulty workers, of which a plan has none",
        "offload": "saves memory, and changes no result",
        "grace_s": "seconds that depend on the cluster; quorum is tried instead",
    },
    "sparse_loco": {
        "outer_lr": "1, as in plain averages; the paper's outer step is plain SGD",
        "decay": "belongs to the ratio; not measured on its own",
        "chunk": "how entries are chosen, not how many; ratio is tried",
        "bits": "values are few; ratio decides more of the bytes",
    },
    "asp": _OF_PUSHES,
    "ssp": {**_OF_PUSHES, "staleness": "longer bounds are tried as DSSP, and none as ASP"},
    "dssp": {
        **_OF_PUSHES,
        "codec": _CODEC_OF_ASP,
        "low": "the bound is chosen between low and high while running",
        "high": "the bound is chosen between low and high while running",
    },
    "gssp": {
        **_OF_PUSHES,
        "codec": "sparse, its own, is tried",
        "staleness": "workers of a group are alike, so it seldom binds",
        "groups": "auto measures them",
        "likeness": "of groups by measured speed; not measured on its own",
        "window": "of groups by measured speed; not measured on its own",
    },
    "oscars": {
        "limit": "binds only where a worker is more than four times slower",
        "quantile": "matters from ten workers on",
        "patience": "ends rounds of workers that are late, which is for transient stragglers",
        "lateness": "counts late pushes, which is for transient stragglers",
        "belief": "how fast measured speeds follow; all trials of a plan begin without any",
        "weighted": "for data that differ between workers; a plan's are shuffled",
        "normalise": "for data that differ between workers; a plan's are shuffled",
    },
    "auto": {
        "window": "it adapts by itself",
        "gain": "it adapts by itself",
        "longest": "longer periods are tried as LocalSGD",
    },
}
"""Settings that no candidate varies, by strategy, each with the reason."""

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
