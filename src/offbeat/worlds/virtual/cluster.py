"""Description of a cluster: step times, links, sites, and when workers are slow, away, hung or cut off.

A cluster is a frozen record, made in Python or read from TOML (`load_cluster`); `dump` writes it back.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from offbeat.core.fields import Choice, Field, FieldError, Flag, Key, ListOf, Text, Whole
from offbeat.core.settings import Settings, Table, nearest
from offbeat.core.toml import read_toml, write_toml
from offbeat.errors import SettingError
from offbeat.worlds.virtual.costs import CodecCost, ShardCost
from offbeat.worlds.virtual.outages import (
    MOST_WORKERS,
    Absence,
    Churn,
    Cut,
    ElasticTimes,
    Hang,
    Outage,
    Seconds,
    Slowdown,
    by_worker,
)
from offbeat.worlds.virtual.rates import RateField
from offbeat.worlds.virtual.step_times import Fraction, Measured, StepTime, usual_seconds

__all__ = [
    "MOST_WORKERS",
    "Absence",
    "Churn",
    "Cluster",
    "Cut",
    "Hang",
    "ServerMachines",
    "Site",
    "Slowdown",
    "Workers",
]

PRESETS = Path(__file__).with_name("presets")
COLLECTIVES = ("ring", "tree", "best")
COLLECTIVES_OF = {"gloo": "ring", "nccl": "best"}  # by backend; NCCL chooses by size


Up = Annotated[float, RateField("rate of the uplink"), Key("up")]
Down = Annotated[float, RateField("rate of the downlink"), Key("down")]
Count = Annotated[int, Whole(at_least=1, at_most=MOST_WORKERS)]
Name = Annotated[str, Text()]


@dataclass(frozen=True, kw_only=True)
class Workers(Settings):
    """`[[workers]]`: a group of equal workers. Ranks are assigned group after group."""

    step_s: StepTime
    up_bits_per_s: Annotated[float, RateField("rate of the uplink", drawn=True), Key("up")]
    down_bits_per_s: Annotated[float, RateField("rate of the downlink", drawn=True), Key("down")]
    latency_s: Seconds = 0.0  # one way, to a worker of the same site
    count: Count = 1
    site: Name = ""


@dataclass(frozen=True, kw_only=True)
class Site(Settings):
    """`[[sites]]`: a rack or a region whose nodes use one uplink to all other sites."""

    name: Name
    up_bits_per_s: Up = math.inf
    down_bits_per_s: Down = math.inf
    latency_s: Seconds = 0.0  # one way, to another site, on top of the nodes' own


@dataclass(frozen=True, kw_only=True)
class ServerMachines(Settings):
    """`[server]`: machines for parameter servers. Without it, a server has worker 0's NIC and site."""

    up_bits_per_s: Up
    down_bits_per_s: Down
    latency_s: Seconds = 0.0
    count: Count = 1
    site: Name = ""


def _tables(name: str, of: type[Settings]) -> Field:
    return ListOf(item=Table(of=of), noun=f"one or more [[{name}]]")


@dataclass(frozen=True, kw_only=True)
class Cluster(Settings):
    """A whole cluster, whose workers have the ranks 0 to `size` − 1."""

    workers: Annotated[tuple[Workers, ...], _tables("workers", Workers)]
    sites: Annotated[tuple[Site, ...], _tables("sites", Site)] = ()
    slow: Annotated[tuple[Slowdown, ...], _tables("slow", Slowdown)] = ()
    away: Annotated[tuple[Absence, ...], _tables("away", Absence)] = ()
    hung: Annotated[tuple[Hang, ...], _tables("hung", Hang)] = ()
    cut_off: Annotated[tuple[Cut, ...], _tables("cut_off", Cut)] = ()
    churn: Annotated[Churn | None, Table(of=Churn, noun="a table [churn]")] = None
    elastic: Annotated[ElasticTimes | None, Table(of=ElasticTimes, noun="a table [elastic]")] = None
    server: Annotated[ServerMachines | None, Table(of=ServerMachines, noun="a table [server]")] = None
    codecs: Annotated[tuple[CodecCost, ...], _tables("codecs", CodecCost)] = ()
    shards: Annotated[ShardCost | None, Table(of=ShardCost, noun="a table [shards]")] = None
    backend: Annotated[str, Choice("library of the all-reduces", of=tuple(COLLECTIVES_OF))] = "gloo"
    collectives: Annotated[str | None, Choice("how an all-reduce travels", of=COLLECTIVES)] = None
    headers: Fraction = 0.0  # bytes of headers for each byte that is sent; TCP's, at 1500 a packet: 0.044
    slow_start: Annotated[bool, Flag("whether connections that were idle start slowly, as TCP's do")] = True
    queue_s: Seconds = 0.0  # of traffic that wait for a receiver at most; 0: links are divided evenly instead
    operation_s: Seconds = 0.0  # software overhead of one operation, on top of latency
    least_reduce_s: Seconds = 0.0  # that an all-reduce takes, however few bytes it has
    least_exchange_s: Seconds = 0.0  # the same of an all-gather, an all-to-all and a reduce-scatter
    least_control_s: Seconds = 0.0  # the same of an all-reduce of a few numbers, such as a flag
    forward_share: Fraction = 1 / 3  # of a step's seconds
    update_share: Fraction = 0.0  # of a step's seconds, at the end: the optimizer's step
    summary: Name = ""

    def check(self) -> None:
        names = [site.name for site in self.sites]
        for index, name in enumerate(names):
            if not name or name in names[:index]:
                raise FieldError(("sites", index, "name"), f"expected a name of its own, not {name!r}")
        members = [(("workers", index), group.site) for index, group in enumerate(self.workers)]
        for where, site in [*members, *([(("server",), self.server.site)] if self.server else [])]:
            if site and site not in names:
                raise FieldError(
                    (*where, "site"), f"no [[sites]] has the name {site!r}{nearest(site, names)}"
                )
        if self.size > MOST_WORKERS:
            raise FieldError(("workers",), f"expected {MOST_WORKERS} workers at most, not {self.size}")
        below = f"expected below {self.size}, the number of workers"
        for index, slow in enumerate(self.slow):
            if max(slow.workers) >= self.size:
                raise FieldError(("slow", index, "workers"), below)
        for table in ("away", "hung", "cut_off"):
            self._check_outages(table, below)

    def _check_outages(self, table: str, below: str) -> None:
        """Refuse unknown workers, and a second outage of a worker before its first has ended."""
        outages: tuple[Outage, ...] = getattr(self, table)
        for index, outage in enumerate(outages):
            several = isinstance(outage, Cut)
            workers = outage.workers if isinstance(outage, Cut) else (outage.worker,)
            if max(workers) >= self.size:
                raise FieldError((table, index, "workers" if several else "worker"), below)
            for worker in workers:
                for other in self.outages(worker):
                    if other is not outage and other.from_s <= outage.from_s < other.until_s:
                        already = f"worker {worker} is {other.word} already at {outage.from_s!r} s"
                        raise FieldError((table, index), already)

    @property
    def all_reduces_by(self) -> str:
        """The way of all-reduces: what `collectives` says, or else the backend's."""
        return self.collectives or COLLECTIVES_OF[self.backend]

    @cached_property
    def size(self) -> int:
        """Number of workers."""
        return sum(group.count for group in self.workers)

    def for_workers(self, n: int) -> "Cluster":
        """Return this cluster with n workers: groups keep their proportions, by largest remainders.

        Of equal remainders the earlier group's comes first; a group without workers is removed. Slowdowns and
        absences stay with their ranks, and are removed with ranks of n or more.
        """
        if not 1 <= n <= MOST_WORKERS:
            raise SettingError(f"a cluster of {n} workers: expected 1 to {MOST_WORKERS}")
        if n == self.size:
            return self
        counts = [n * group.count // self.size for group in self.workers]
        by_remainder = sorted(
            range(len(counts)), key=lambda index: -(n * self.workers[index].count % self.size)
        )
        for index in by_remainder[: n - sum(counts)]:
            counts[index] += 1
        slow_ranks = [(slow, tuple(rank for rank in slow.workers if rank < n)) for slow in self.slow]
        return replace(
            self,
            workers=tuple(
                replace(g, count=count) for g, count in zip(self.workers, counts, strict=True) if count
            ),
            slow=tuple(replace(slow, workers=ranks) for slow, ranks in slow_ranks if ranks),
            away=tuple(away for away in self.away if away.worker < n),
            hung=tuple(hang for hang in self.hung if hang.worker < n),
            cut_off=tuple(
                replace(cut, workers=ranks)
                for cut in self.cut_off
                if (ranks := tuple(rank for rank in cut.workers if rank < n))
            ),
        )

    def with_step_seconds(self, seconds: float) -> "Cluster":
        """Return this cluster with `seconds` as worker 0's usual step time, and the others in proportion.

        Step times that were measured stay: they are the model's own.
        """
        if any(isinstance(group.step_s, Measured) for group in self.workers):
            return self
        factor = seconds / usual_seconds(self.workers[0].step_s)
        return replace(self, slow=(*self.slow, Slowdown(workers=tuple(range(self.size)), factor=factor)))

    @cached_property
    def _group_of(self) -> tuple[Workers, ...]:
        return tuple(group for group in self.workers for _ in range(group.count))

    @cached_property
    def _member_of(self) -> tuple[int, ...]:
        return tuple(member for group in self.workers for member in range(group.count))

    def group_of(self, worker: int) -> Workers:
        """Return the group of a worker."""
        return self._group_of[worker]

    def step_seconds(self, worker: int, step: int, now_s: float, seed: int) -> float:
        """Return the seconds of a step that begins now: the same at every call, in any order of calls."""
        step_s = self._group_of[worker].step_s
        if isinstance(step_s, float):
            seconds = step_s
        else:
            seconds = step_s.of_worker(step, seed, worker, self._member_of[worker])
        for slow in self._slow_of.get(worker, ()):
            if slow.from_s <= now_s < slow.until_s:
                seconds *= slow.factor
        return seconds

    @cached_property
    def _slow_of(self) -> dict[int, list[Slowdown]]:
        slow_of: dict[int, list[Slowdown]] = {}
        for slow in self.slow:
            for rank in set(slow.workers):
                slow_of.setdefault(rank, []).append(slow)
        return slow_of

    def ready_fractions(self, worker: int) -> tuple[float, ...]:
        """Return the measured fractions of a step at which blocks of gradients are complete, if any."""
        step_s = self._group_of[worker].step_s
        return step_s.ready if isinstance(step_s, Measured) else ()

    def absences(self, worker: int) -> tuple[Absence, ...]:
        """Return the absences of a worker, in order of time."""
        return tuple(outage for outage in self.outages(worker) if isinstance(outage, Absence))

    def outages(self, worker: int) -> list[Outage]:
        """Return when a worker is away, hung or cut off, in order of time."""
        return self._outages_of.get(worker, [])

    @cached_property
    def _outages_of(self) -> dict[int, list[Outage]]:
        return by_worker((*self.away, *self.hung, *self.cut_off))


def preset_names() -> list[str]:
    """Return the names of the clusters that come with Offbeat."""
    return sorted(file.stem for file in PRESETS.glob("*.toml"))


def load_cluster(name_or_path: str | Path | Cluster) -> Cluster:
    """Return a preset by its name, the cluster that a TOML file describes, or the given cluster."""
    if isinstance(name_or_path, Cluster):
        return name_or_path
    name = str(name_or_path)
    presets = preset_names()
    file = PRESETS / f"{name}.toml" if name in presets else Path(name_or_path)
    if name not in presets and not file.exists() and file.suffix != ".toml" and len(file.parts) == 1:
        raise SettingError(
            f"no cluster is named {name!r}{nearest(name, presets)}; or give the path of a .toml file"
        )
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{name}: the cluster file cannot be read: {reason}") from None
    return read_toml(Cluster, source, name)


def dump(cluster: Cluster) -> str:
    """Return TOML text that loads back as an equal cluster."""
    return write_toml(cluster)
