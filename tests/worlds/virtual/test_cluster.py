"""Clusters: step times that repeat, files that load back, mistakes told with file, line and field."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.settings import Settings
from offbeat.core.toml import read_toml
from offbeat.errors import SettingError
from offbeat.worlds.virtual.cluster import (
    Absence,
    Churn,
    Cluster,
    ServerMachines,
    Site,
    Slowdown,
    Workers,
    dump,
    load_cluster,
    preset_names,
)
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.step_times import (
    Exponential,
    Kinds,
    Lognormal,
    Measured,
    Normal,
    StepTime,
    Stragglers,
    Trace,
)

pytestmark = pytest.mark.virtual

PAPERS = ["paper-gssp", "paper-osp", "paper-selsync"]
PRESET_NAMES = ["internet", "lan-10g", "lan-1g", "mixed-gpus", *PAPERS, "slow-lan", "stragglers", "wan"]


def cluster_of(step_s: StepTime, count: int = 1, **rest: object) -> Cluster:
    group = Workers(step_s=step_s, up_bits_per_s=1e9, down_bits_per_s=1e9, count=count)
    return Cluster(workers=(group,), **rest)  # type: ignore[arg-type]


# --- step times


def test_a_step_does_not_depend_on_what_was_asked_before() -> None:
    cluster = cluster_of(Lognormal(median_s=0.05, sigma=0.5), count=3)
    asked = [(worker, step) for worker in range(3) for step in range(50)]
    forwards = {key: cluster.step_seconds(*key, 0.0, 1) for key in asked}
    again = cluster_of(Lognormal(median_s=0.05, sigma=0.5), count=3)
    assert {key: again.step_seconds(*key, 0.0, 1) for key in reversed(asked)} == forwards
    assert len(set(forwards.values())) == len(asked), "workers and steps draw numbers of their own"
    assert cluster.step_seconds(0, 0, 0.0, 2) != forwards[0, 0], "so does another seed"


def test_slowness_applies_while_it_lasts_and_multiplies() -> None:
    slow = (
        Slowdown(workers=(2,), from_s=10, until_s=20, factor=4),
        Slowdown(workers=(2, 1), from_s=15, factor=2),
    )
    cluster = cluster_of(0.5, count=3, slow=slow)

    def at(worker: int, now_s: float) -> float:
        return cluster.step_seconds(worker, 0, now_s, 0)

    assert [at(2, now_s) for now_s in (9.9, 10, 14.9, 15, 20)] == [0.5, 2.0, 2.0, 4.0, 1.0]
    assert [at(worker, 16) for worker in range(3)] == [0.5, 1.0, 4.0]


@pytest.mark.parametrize(
    "step_s",
    [
        0.1,
        Lognormal(median_s=0.1, sigma=0.3),
        Normal(mean_s=0.1, deviation_s=0.01),
        Exponential(least_s=0.1, tail_s=0.05),
        Stragglers(usual_s=0.1, probability=0.1, factor=8.0),
        Trace(trace_s=(0.3, 0.1, 0.1)),
    ],
    ids=lambda step_s: type(step_s).__name__,
)
def test_another_usual_step_keeps_the_proportions_of_workers_and_steps(step_s: StepTime) -> None:
    first = Workers(step_s=step_s, up_bits_per_s=1e9, down_bits_per_s=1e9)
    late = Slowdown(workers=(1,), factor=3.0, from_s=10.0)
    cluster = Cluster(workers=(first, replace(first, step_s=0.4, count=2)), slow=(late,))
    scaled = cluster.with_step_seconds(2.0)

    def seconds(of: Cluster) -> list[float]:
        when = [(worker, step, now_s) for worker in range(3) for step in range(301) for now_s in (0.0, 20.0)]
        return [of.step_seconds(worker, step, now_s, 7) for worker, step, now_s in when]

    before, after = seconds(cluster), seconds(scaled)
    factor = after[0] / before[0]
    assert after == pytest.approx([factor * each for each in before])
    assert median(after[: 2 * 301]) == pytest.approx(2.0, rel=0.1)


def test_measured_steps_are_the_models_own_and_stay() -> None:
    measured = cluster_of(Measured(measured_s=(0.1, 0.2)))
    assert measured.with_step_seconds(5.0) == measured


def test_absences_come_in_order_of_time() -> None:
    later, earlier = Absence(worker=1, from_s=50), Absence(worker=1, from_s=30, until_s=40)
    cluster = cluster_of(0.5, count=2, away=(later, earlier))
    assert cluster.absences(1) == (earlier, later)
    assert cluster.absences(0) == ()
    assert later.until_s == math.inf


# --- another number of workers


def test_stretching_keeps_proportions() -> None:
    gssp = load_cluster("paper-gssp")
    assert [group.count for group in gssp.for_workers(10_000).workers] == [2500] * 4
    assert [group.count for group in gssp.for_workers(6).workers] == [2, 2, 1, 1]
    assert [group.step_s for group in gssp.for_workers(2).workers] == [g.step_s for g in gssp.workers[:2]]
    assert gssp.for_workers(16) == gssp
    fast, slow = replace(gssp.workers[0], count=3), replace(gssp.workers[1], count=1)
    assert [group.count for group in Cluster(workers=(fast, slow)).for_workers(5).workers] == [4, 1]
    with pytest.raises(SettingError, match="0 workers"):
        gssp.for_workers(0)


def test_shrinking_drops_what_names_lost_ranks() -> None:
    slow = (Slowdown(workers=(0, 3), factor=2), Slowdown(workers=(3,), factor=2))
    cluster = cluster_of(
        0.5, count=4, slow=slow, away=(Absence(worker=3, from_s=1), Absence(worker=1, from_s=1))
    )
    small = cluster.for_workers(2)
    assert small.slow == (Slowdown(workers=(0,), factor=2),)
    assert small.away == (Absence(worker=1, from_s=1),)


@given(st.sampled_from(PRESET_NAMES), st.integers(1, 20_000))
def test_every_preset_works_at_any_size(name: str, n: int) -> None:
    cluster = load_cluster(name).for_workers(n)
    assert cluster.size == n
    assert cluster.step_seconds(n - 1, 0, 0.0, 0) > 0


# --- files


def test_presets_are_all_there_with_a_summary() -> None:
    assert preset_names() == PRESET_NAMES
    for name in PRESET_NAMES:
        assert 20 < len(load_cluster(name).summary) < 110
        assert "\n" not in load_cluster(name).summary
    assert load_cluster("paper-selsync").size == 16
    assert load_cluster("paper-selsync").workers[0].up_bits_per_s == 5e9
    assert len(load_cluster("wan").sites) == 3


def test_the_internet_has_the_links_that_it_names() -> None:
    cluster = load_cluster("internet")
    assert cluster.size == 1000 and len({group.site for group in cluster.workers}) == len(cluster.sites) == 12
    network = Network(cluster)
    pairs = [(a, b) for a in range(0, 1000, 37) for b in range(5, 1000, 41) if a != b]
    latencies = [network.send(a, b, 1).route.latency_s - cluster.operation_s for a, b in pairs]
    assert min(latencies) == pytest.approx(0.01) and max(latencies) == pytest.approx(0.2)
    up = network.bytes_per_s[:1000] * 8 * (1 + cluster.headers)
    assert 20e6 <= up.min() < 21e6 and 290e6 < up.max() <= 300e6
    assert cluster.churn is not None and cluster.churn.mean_life_s == 40 * 60


seconds = st.floats(1e-9, 1e9)
rates = st.sampled_from([1e9, 2.5e9, 1e8, 1234567.0, 1e3, 7.0, 0.1 + 0.2]) | st.floats(1, 1e13)
shares = st.floats(0, 1)
some_seconds = st.lists(seconds, min_size=1, max_size=4).map(tuple)
step_times = st.one_of(
    seconds,
    st.builds(Lognormal, median_s=seconds, sigma=seconds),
    st.builds(Normal, mean_s=seconds, deviation_s=seconds),
    st.builds(Exponential, least_s=seconds, tail_s=seconds),
    st.builds(Stragglers, usual_s=seconds, probability=shares, factor=seconds),
    st.builds(Trace, trace_s=some_seconds),
    st.builds(Kinds, kinds_s=some_seconds, sigma=seconds),
    st.builds(Measured, measured_s=some_seconds, ready=st.lists(shares, min_size=1).map(sorted).map(tuple)),
)
nic = {"up_bits_per_s": rates, "down_bits_per_s": rates, "latency_s": seconds | st.just(0.0)}
some_site = st.sampled_from(["", "rack a", 'quo"ted\\'])
clusters = st.builds(
    Cluster,
    workers=st.lists(
        st.builds(Workers, step_s=step_times, count=st.integers(2, 9), site=some_site, **nic),
        min_size=1,
        max_size=3,
    ).map(tuple),
    sites=st.tuples(st.builds(Site, name=st.just("rack a"), **nic), st.just(Site(name='quo"ted\\'))),
    slow=st.sampled_from([(), (Slowdown(workers=(0, 1), from_s=10, until_s=20.5, factor=4),)]),
    away=st.sampled_from([(), (Absence(worker=1, from_s=3), Absence(worker=0, from_s=0.5, until_s=1))]),
    churn=st.none() | st.builds(Churn, mean_life_s=seconds, away_s=some_seconds),
    server=st.none() | st.builds(ServerMachines, count=st.integers(1, 4), site=some_site, **nic),
    operation_s=seconds,
    forward_share=shares,
    summary=st.text(st.characters(exclude_categories=["Cs"])),
)


@given(clusters)
def test_a_dump_loads_back_equal(cluster: Cluster) -> None:
    assert read_toml(Cluster, dump(cluster), "dumped") == cluster


def test_a_dump_escapes_what_toml_does_not_allow() -> None:
    cluster = cluster_of(0.1, summary='\x7f \x00 \n " \\ é 🥁')
    assert read_toml(Cluster, dump(cluster), "dumped") == cluster


def test_a_dump_is_pleasant_to_read() -> None:
    lines = dump(load_cluster("stragglers")).splitlines()
    assert 'up = "1gbit"' in lines
    assert "step_s = { stragglers = 0.05, probability = 0.05, factor = 5.0 }" in lines


def test_a_file_says_everything(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        """
        forward_share = 0.25
        operation_s = 1e-3
        [[workers]]
        count = 4
        step_s = 0.05
        up = "1gbit"
        down = 5e8
        latency_s = 0.001
        [[slow]]
        workers = [2]
        from_s = 10
        until_s = 20
        factor = 4
        [[away]]
        worker = 3
        from_s = 30
        [server]
        up = "10gbit"
        down = "10gbit"
        """
    )
    cluster = load_cluster(file)
    group = Workers(step_s=0.05, up_bits_per_s=1e9, down_bits_per_s=5e8, latency_s=0.001, count=4)
    assert cluster == Cluster(
        workers=(group,),
        slow=(Slowdown(workers=(2,), from_s=10.0, until_s=20.0, factor=4.0),),
        away=(Absence(worker=3, from_s=30.0),),
        server=ServerMachines(up_bits_per_s=1e10, down_bits_per_s=1e10),
        operation_s=1e-3,
        forward_share=0.25,
    )
    assert load_cluster(str(file)) == cluster


GOOD = """\
# a comment = with [brackets]
summary = '''
[[workers]]
step_s = "not a key"
'''
[[workers]]
step_s = {lognormal = 0.05, sigma = 0.1}
up = "1gbit"
down = "1gbit"
[[workers]]
count = 2
step_s = {measured = [
  0.05,
  0.06,
]}
up = "1gbit"
down = "1gbit"
[[slow]]
workers = [0]
factor = 2
"""


TOP = "# a comment = with [brackets]"


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("count = 2", "count = 2.0", 11, "workers[1].count: expected a whole number from 1"),
        ("count = 2", "count = -2", 11, "workers[1].count: expected a whole number from 1"),
        ("count = 2", "count = true", 11, "workers[1].count: expected a whole number from 1"),
        ("count = 2", "cuont = 2", 11, "workers[1].cuont: not a known field; did you mean 'count'? Known: "),
        ("sigma = 0.1", "sigma = -0.1", 7, "workers[0].step_s.sigma: expected a number above 0, not -0.1"),
        ("sigma = 0.1", "sgma = 1", 7, "workers[0].step_s.sgma: not a known field; did you mean 'sigma'?"),
        (", sigma = 0.1", "", 7, "workers[0].step_s.sigma: missing; expected a number above 0"),
        ("lognormal", "lognromal", 7, "workers[0].step_s: expected a number of seconds above 0 or a table"),
        (
            "lognormal = 0.05",
            "lognormal = 'x'",
            7,
            "workers[0].step_s.lognormal: expected a number of seconds",
        ),
        (
            "  0.06",
            "  nan",
            12,
            "workers[1].step_s.measured[1]: expected a number of seconds above 0, not nan",
        ),
        ('up = "1gbit"', 'up = "fast"', 8, "workers[0].up: expected bits per second"),
        ('up = "1gbit"', "up = false", 8, "workers[0].up: expected bits per second"),
        ('up = "1gbit"\n', "", 6, "workers[0].up: missing; expected bits per second"),
        ("count = 2", "latency_s = 1" + "0" * 400, 11, "workers[1].latency_s: expected a number of seconds"),
        ("count = 2", 'site = "eu"', 11, "workers[1].site: no [[sites]] has the name 'eu'"),
        ("workers = [0]", "workers = [0, 3]", 19, "slow[0].workers: expected below 3"),
        ("workers = [0]", "workers = []", 19, "slow[0].workers: expected a list of workers' numbers"),
        ("factor = 2", "factor = 2\nfrom_s = 3\nuntil_s = 3", 22, "slow[0].until_s: expected a time after"),
        ("factor = 2", "factor = 2\n[[away]]\nworker = 9\nfrom_s = 1", 22, "away[0].worker: expected below"),
        ("factor = 2", "factor = 2\n[workers.extra]\nx = 1", 21, "workers[1].extra: not a known field"),
        (TOP, "operation_s = -1", 1, "operation_s: expected a number of seconds, 0 or more, not -1"),
        (TOP, "away = 3", 1, "away: expected one or more [[away]], not 3"),
        ("factor = 2", "factor = ", 20, "not TOML: Invalid value"),
        ("factor = 2", "factor = 2\nfactor = 3", 21, "not TOML: Cannot overwrite a value"),
        ("factor = 2\n", "factor = [2\n", 20, "not TOML: Unclosed array"),
    ],
)
def test_mistakes_are_told_with_file_line_and_field(
    tmp_path: Path, old: str, new: str, line: int, problem: str
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(GOOD)
    assert load_cluster(file).size == 3
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(SettingError) as caught:
        load_cluster(file)
    assert f"cluster.toml, line {line}: {problem}" in str(caught.value)


def test_an_overlap_of_absences_and_twins_of_sites_are_refused() -> None:
    with pytest.raises(SettingError, match=r"away\[1\]: worker 0 is away already at 2"):
        cluster_of(0.1, away=(Absence(worker=0, from_s=1), Absence(worker=0, from_s=2)))
    with pytest.raises(SettingError, match=r"sites\[1\]\.name: expected a name of its own, not 'eu'"):
        cluster_of(0.1, sites=(Site(name="eu"), Site(name="eu")))
    with pytest.raises(SettingError, match=r"ready: expected fractions in ascending order"):
        Measured(measured_s=(0.1,), ready=(0.5, 0.4))


def test_python_is_checked_like_a_file() -> None:
    with pytest.raises(SettingError, match=r"up=0\.0: bits per second"):
        Workers(step_s=0.1, up_bits_per_s=0.0, down_bits_per_s=1.0)
    assert Workers(step_s=0.1, up_bits_per_s=1, down_bits_per_s=2).up_bits_per_s == 1.0
    assert issubclass(Cluster, Settings)


def test_a_cluster_may_be_given_as_it_is() -> None:
    cluster = cluster_of(0.1)
    assert load_cluster(cluster) is cluster


def test_an_unknown_name_lists_the_known(tmp_path: Path) -> None:
    known = r"'lan1g'; did you mean 'lan-1g'\? Known: internet, lan-10g, lan-1g, .*wan"
    with pytest.raises(SettingError, match=known):
        load_cluster("lan1g")
    with pytest.raises(SettingError, match=r"nowhere\.toml: .* No such file"):
        load_cluster("nowhere.toml")
    with pytest.raises(SettingError, match=r"Is a directory"):
        load_cluster(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="not UTF-8"):
        load_cluster(tmp_path / "binary.toml")
