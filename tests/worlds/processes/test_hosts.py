"""Hosts: which bytes of a collective leave this one, counted by hand for two hosts of two ranks."""

from __future__ import annotations

import pytest

from offbeat.worlds.processes.hosts import Hosts, host_number

TWO_BY_TWO = [0, 0, 2, 2]


@pytest.mark.parametrize(("rank", "left"), [(0, 0), (1, 100), (2, 0), (3, 100)])
def test_a_ring_leaves_a_host_where_the_next_rank_is_elsewhere(rank: int, left: int) -> None:
    assert Hosts(rank, TWO_BY_TWO).left_by_ring(100) == left


def test_pairs_are_counted_one_by_one() -> None:
    assert Hosts(1, TWO_BY_TWO).left_pairwise([1, 10, 100, 1000]) == 1100
    assert Hosts(2, TWO_BY_TWO).left_pairwise([1, 10, 100, 1000]) == 11


def test_nothing_leaves_a_host_that_has_all_ranks() -> None:
    hosts = Hosts(1, [5, 5, 5])
    assert (hosts.left_by_ring(9), hosts.left_by_tree(9), hosts.left_pairwise([9, 9, 9])) == (0, 0, 0)
    assert Hosts(1, TWO_BY_TWO).left_by_tree(9) == 9


def test_launchers_say_which_ranks_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert host_number(3, emulated=False) == 2
    assert host_number(3, emulated=True) == 3, "each rank stands for a host"
    monkeypatch.delenv("LOCAL_RANK")
    assert host_number(3, emulated=False) == 0, "all on one host"
