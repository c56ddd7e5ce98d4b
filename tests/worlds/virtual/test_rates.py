"""Rates that change over time: what is read and written, and the seconds of transfers across a change."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest

from offbeat import BSP
from offbeat.core.toml import read_toml
from offbeat.errors import SettingError
from offbeat.worlds.virtual.cluster import Cluster, Site, Workers, dump
from offbeat.worlds.virtual.rates import DOWN, UP, ChangingRate, DrawnRate, RateField, changes_of, rate_of
from tests.support.networks import MB, arrivals, network_of, workers
from tests.support.virtual_runs import BYTES_PER_S, MARKED, close, cluster_of, play, ring_s

pytestmark = pytest.mark.virtual


def with_rates(group: Workers, rate: float) -> Workers:
    return replace(group, up_bits_per_s=rate, down_bits_per_s=rate)


DROPS = ChangingRate(8e6, ((2.0, 4e6), (3.0, 8e5)))  # 1 MB/s, from 2 s on half of it, from 3 s on a tenth


def test_a_list_of_rates_is_read_and_written_back() -> None:
    listed = RateField("").read([[0, "8mbit"], [2, 4e6], [3.0, "800kbit"]])
    assert listed == DROPS != 8e6
    assert float(listed) == 8e6 and changes_of(listed) == DROPS.changes and changes_of(8e6) == ()
    assert RateField("").plain(listed) == [[0.0, "8mbit"], [2.0, "4mbit"], [3.0, "800kbit"]]
    assert pickle.loads(pickle.dumps(listed)) == listed and hash(listed) == hash(DROPS)
    cluster = Cluster(workers=(workers(2),), sites=(Site(name="a", up_bits_per_s=listed),))
    assert read_toml(Cluster, dump(cluster), "written") == cluster


@pytest.mark.parametrize(
    "wrong",
    [[], [[1, "8mbit"]], [[0, "8mbit"], [0, "4mbit"]], [[0, "8mbit", 1]], [[0, -1]], [["0", 1]], [[0, None]]],
    ids=str,
)
def test_a_list_that_does_not_begin_at_0_or_has_no_order_is_refused(wrong: object) -> None:
    with pytest.raises(SettingError, match=r"list of \[from_s, rate\] from 0 s on"):
        Cluster.from_table({"workers": [{"step_s": 0.1, "up": wrong, "down": "8mbit"}]})


def test_transfers_in_progress_get_the_new_rate() -> None:
    network = network_of(with_rates(workers(1), DROPS), workers(1, mbytes_per_s=100))
    changes = sorted(network.rate_changes, key=lambda change: change[0])
    assert sorted({(at_s, bits) for at_s, _, bits in changes}) == list(DROPS.changes)
    transfer = network.send(0, 1, 4 * MB)  # 2 MB in 2 s, half a MB in the third, 1.5 MB at a tenth
    network.start(0.0, transfer)
    for at_s, links, bits in changes:
        network.change_rate(at_s, links, bits)
    assert network.next_event() == close(3 + 1.5 / 0.1)
    assert network.send(0, 1, MB).alone_s == close(10.0), "and so do those that start later"


def test_a_run_is_slower_from_the_change_on() -> None:
    """Steps of 1 s and a ring of two: twelve steps, of which those after 5 s have a hundredth of the rate."""
    drop = ChangingRate(8 * BYTES_PER_S, ((5.0, 0.08 * BYTES_PER_S),))
    plain = cluster_of(1.0, 1.0)
    slow = Cluster(workers=tuple(with_rates(group, drop) for group in plain.workers))
    steps, fast_s, slow_s = 12, 1 + ring_s(MARKED, 2), 1 + 100 * ring_s(MARKED, 2)
    before = 4  # 4 x 1.004 s: the fifth step's ring begins at 5.016 s
    assert play(plain, BSP(), steps).seconds == close(steps * fast_s)
    assert play(slow, BSP(), steps).seconds == close(before * fast_s + (steps - before) * slow_s)


def test_headers_take_their_share_of_every_link() -> None:
    network = network_of(workers(2), headers=0.044)
    message = network.send(0, 1, 100 * MB)
    assert arrivals(network, (0.0, message))[message] == close(1.044)
    assert message.sent.tolist() == [100 * MB], "bytes of headers are not counted"


SPREAD = DrawnRate(20e6, 300e6)


def test_bounds_are_read_and_written_back() -> None:
    read = RateField("", drawn=True).read({"between": ["20mbit", 300e6]})
    assert read == SPREAD != float(SPREAD) and changes_of(read) == ()
    assert pickle.loads(pickle.dumps(read)) == read and hash(read) == hash(SPREAD)
    cluster = Cluster(workers=(with_rates(workers(3), read),))
    assert read_toml(Cluster, dump(cluster), "written") == cluster


@pytest.mark.parametrize(
    "wrong",
    [{"between": ["2gbit", "1gbit"]}, {"between": [1]}, {"between": [0, 1]}, {"among": [1, 2]}, {}],
    ids=str,
)
def test_other_bounds_are_refused(wrong: object) -> None:
    with pytest.raises(SettingError, match="bounds of what workers draw"):
        Cluster.from_table({"workers": [{"step_s": 0.1, "up": wrong, "down": "8mbit"}]})


def test_a_site_or_a_server_draws_nothing() -> None:
    with pytest.raises(SettingError, match="up"):
        Site(name="a", up_bits_per_s=SPREAD)


def test_workers_draw_evenly_in_the_logarithm_and_each_way_apart() -> None:
    drawn = [rate_of(SPREAD, worker, UP) for worker in range(4000)]
    assert 20e6 < min(drawn) < 20.2e6 and 297e6 < max(drawn) < 300e6
    below = sum(rate < float(SPREAD) for rate in drawn) / len(drawn)
    assert below == pytest.approx(0.5, abs=0.03) and float(SPREAD) == close(math.sqrt(20e6 * 300e6))
    assert rate_of(SPREAD, 7, UP) != rate_of(SPREAD, 7, DOWN)
    assert rate_of(8e6, 7, UP) == 8e6


def test_a_message_takes_the_seconds_of_its_own_worker_s_link() -> None:
    network = network_of(with_rates(workers(3), SPREAD), workers(1, mbytes_per_s=1e6))
    for worker in range(3):
        seconds = MB * 8 / rate_of(SPREAD, worker, UP)
        assert network.send(worker, 3, MB).alone_s == close(seconds)
        assert network.send(3, worker, MB).alone_s == close(MB * 8 / rate_of(SPREAD, worker, DOWN))
