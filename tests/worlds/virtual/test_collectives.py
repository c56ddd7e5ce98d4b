"""Shares in virtual time: the bits of real ranks, seconds in closed form, bytes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.core.port import Lane, Op, Port
from offbeat.errors import MismatchError, OffbeatError
from offbeat.worlds.virtual.cluster import Site, Workers
from tests.support.crew import Crew
from tests.support.exchanges import (
    DTYPES,
    Play,
    all_at_once,
    drawn,
    equal_workers,
    lanes_crossed,
    really,
    sizes_of,
    swapped,
    through_flat_memory,
    to_owners_and_back,
    virtually,
)
from tests.support.networks import MB, arrivals, close, network_of, workers

pytestmark = pytest.mark.virtual

# --- the same bits


def by_hand(world: int, dtype: torch.dtype, op: Op, rank: int) -> list[Tensor]:
    """Terms one after the other in the order of ranks, a mean's divided first."""
    seen = []
    for sizes in sizes_of(world):
        terms = [
            torch.cat(drawn(sizes, dtype, r)) * (1 / world if op is Op.MEAN else 1) for r in range(world)
        ]
        total = terms[0]
        for term in terms[1:]:
            total = torch.maximum(total, term) if op is Op.MAX else total + term
        seen += [total.split(sizes)[rank], total]
    return seen


@pytest.mark.parametrize("play", [to_owners_and_back, through_flat_memory])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shares_equal_the_real_ones_bit_for_bit(
    crew: Callable[[int], Crew], play: Play, world: int, dtype: torch.dtype
) -> None:
    real = crew(world).run(really, play, dtype)
    virtual = virtually(play, equal_workers(world), dtype)
    for rank in range(world):
        expected = by_hand(world, dtype, Op.MEAN, rank)
        assert all(map(torch.equal, real[rank][0], expected))
        assert all(map(torch.equal, virtual[rank][0], expected))
        assert real[rank][1].bytes_sent == virtual[rank][1].bytes_sent


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_swapped_is_what_the_others_had_for_one(
    crew: Callable[[int], Crew], world: int, dtype: torch.dtype
) -> None:
    real = crew(world).run(really, swapped, dtype)
    virtual = virtually(swapped, equal_workers(world), dtype)
    for rank in range(world):
        for number, sizes in enumerate(sizes_of(world)):
            for seen in (real[rank][0], virtual[rank][0]):
                for other, came in enumerate(seen[number * world : (number + 1) * world]):
                    assert other == rank or torch.equal(came, drawn(sizes, dtype, other)[rank])
        assert real[rank][1].bytes_sent == virtual[rank][1].bytes_sent


@pytest.mark.parametrize("play", [to_owners_and_back, through_flat_memory])
@pytest.mark.parametrize("op", [Op.SUM, Op.MAX])
def test_sums_and_maxima_of_three(crew: Callable[[int], Crew], play: Play, op: Op) -> None:
    real = crew(3).run(really, play, torch.float32, op)
    virtual = virtually(play, equal_workers(3), torch.float32, op)
    for rank in range(3):
        expected = by_hand(3, torch.float32, op, rank)
        assert all(map(torch.equal, real[rank][0], expected))
        assert all(map(torch.equal, virtual[rank][0], expected))


@pytest.mark.parametrize("play", [all_at_once, lanes_crossed])
@pytest.mark.parametrize("world", [2, 4])
def test_operations_do_not_disturb_each_other(crew: Callable[[int], Crew], play: Play, world: int) -> None:
    real = crew(world).run(really, play)
    virtual = virtually(play, equal_workers(world))
    for (theirs, their_entry), (ours, our_entry) in zip(real, virtual, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert their_entry.sync_steps == our_entry.sync_steps


async def _both_ways(port: Port, sizes: list[int]) -> list[Tensor]:
    shares = drawn(sizes, torch.float64, port.rank)
    whole = torch.cat(shares)
    await port.reduce_scatter(shares)
    return [await port.all_reduce(whole), torch.cat(await port.all_gather(shares))]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_there_and_back_is_a_reduce(sizes: list[int]) -> None:
    for (reduced, gathered), _ in virtually(_both_ways, equal_workers(len(sizes)), sizes):
        torch.testing.assert_close(gathered, reduced)


def test_a_world_of_one_has_it_all_already() -> None:
    [(seen, entry)] = virtually(to_owners_and_back, equal_workers(1), torch.float32)
    assert all(map(torch.equal, seen, by_hand(1, torch.float32, Op.SUM, 0)))
    assert entry.seconds == entry.bytes_sent == entry.communicate_s == 0


async def _misfit(port: Port, sizes: dict[int, list[int]]) -> list[Tensor]:
    await port.reduce_scatter([torch.zeros(size) for size in sizes[port.rank]])
    return []


def test_misfits_are_named() -> None:
    with pytest.raises(OffbeatError, match="3 slices for 2 workers"):
        virtually(_misfit, equal_workers(2), {0: [1, 1, 1], 1: [1, 1]})
    with pytest.raises(
        MismatchError, match=r"worker 1 calls reduce_scatter mean of 8, 4 bytes, worker 0 calls .*4, 8"
    ):
        virtually(_misfit, equal_workers(2), {0: [1, 2], 1: [2, 1]})


# --- seconds and bytes


async def _scatter(port: Port, sizes: list[int]) -> list[Tensor]:
    return [await port.reduce_scatter([torch.zeros(size // 4) for size in sizes])]


async def _gather(port: Port, sizes: list[int]) -> list[Tensor]:
    return await port.all_gather([torch.zeros(size // 4) for size in sizes])


async def _swap(port: Port, sizes: list[int]) -> list[Tensor]:
    away = [torch.zeros(size // 4) for size in sizes]
    return await port.all_to_all(away, [torch.zeros_like(away[port.rank]) for _ in sizes])


@pytest.mark.parametrize("play", [_scatter, _gather, _swap])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_seconds_and_bytes_of_equal_workers(play: Play, world: int) -> None:
    share = 120_000
    for _, entry in virtually(play, equal_workers(world, latency_s=0.01), [share] * world):
        assert entry.seconds == entry.wait_s == entry.communicate_s == close((world - 1) * (0.12 + 0.01))
        assert entry.bytes_sent == (world - 1) * share


def test_bytes_of_uneven_shares_by_hand() -> None:
    sizes = [400, 0, 120, 80]
    plays = (_scatter, _gather, _swap)
    scattered, gathered, swapped = (virtually(play, equal_workers(4), sizes) for play in plays)
    assert [entry.bytes_sent for _, entry in scattered] == [200, 600, 480, 520]
    assert [entry.bytes_sent for _, entry in swapped] == [200, 600, 480, 520]
    assert [entry.bytes_sent for _, entry in gathered] == [1200, 0, 360, 240]
    for _, entry in [*scattered, *gathered, *swapped]:
        assert entry.seconds == close(1200 / 1e6), "worker 0's NIC carries its own share three times"


@pytest.mark.parametrize("n", [2, 4, 1000])
def test_even_shares_are_half_a_ring(n: int) -> None:
    network = network_of(workers(n, latency_s=0.001), operation_s=0.01)
    for half in (network.reduce_scatter([MB] * n, range(n)), network.all_gather([MB] * n, range(n))):
        assert half.alone_s == close((n - 1) * (0.01 + 0.001) + 0.01)
        assert arrivals(network, (network.now_s, half))[half] == close(network.now_s)
        assert half.nbytes == network.ring_all_reduce(n * MB, range(n)).nbytes / 2


def test_one_slow_nic_bounds_the_exchange() -> None:
    network = network_of(workers(3), workers(1, mbytes_per_s=10))
    assert network.reduce_scatter([10 * MB] * 4, range(4)).alone_s == close(30 / 10)
    assert network.all_gather([10 * MB] * 4, range(4)).alone_s == close(30 / 10)
    # a slow owner that owns little receives little, and still sends all that the others own
    lopsided = [13 * MB, 13 * MB, 13 * MB, MB]
    assert network.reduce_scatter(lopsided, range(4)).alone_s == close(39 / 10)
    narrow = Workers(step_s=1, up_bits_per_s=8e8, down_bits_per_s=8e7)
    network = network_of(workers(3), narrow)
    assert network.reduce_scatter(lopsided, range(4)).alone_s == close(3 * 13 / 100), (
        "it is downwards that it is slow"
    )
    assert network.all_gather(lopsided, range(4)).alone_s == close(39 / 10)


def test_every_turn_of_a_far_worker_is_far() -> None:
    network = network_of(workers(3, latency_s=0.001), workers(1, latency_s=0.1))
    assert network.reduce_scatter([0] * 4, range(4)).alone_s == close(3 * 0.1)
    assert network.all_gather([0] * 3, range(3)).alone_s == close(2 * 0.001)


def test_uplinks_carry_what_crosses_them() -> None:
    sites = (Site(name="a", up_bits_per_s=8e7, latency_s=0.05), Site(name="b", down_bits_per_s=8e6))
    network = network_of(workers(2, site="a"), workers(1, site="b"), sites=sites)
    # to owners: both of a send b its 3 MB; back: b gets the two other shares
    assert network.reduce_scatter([MB, 2 * MB, 3 * MB], range(3)).alone_s == close(6 / 1 + 2 * 0.05)
    assert network.all_gather([MB, 2 * MB, 3 * MB], range(3)).alone_s == close(3 / 1 + 2 * 0.05)
    assert network.reduce_scatter([MB, 2 * MB], range(2)).alone_s == close(2 / 100), (
        "within a site: no uplink"
    )


def test_the_lanes_share_the_links() -> None:
    async def play(port: Port) -> list[Tensor]:
        front, back = ([torch.zeros(25_000) for _ in range(4)] for _ in range(2))
        pending = port.reduce_scatter(back, lane=Lane.BACK)
        await port.reduce_scatter(front)
        return [await pending]

    for _, entry in virtually(play, equal_workers(4)):
        assert entry.seconds == close(2 * 3 * 0.1)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40))
def test_bytes_are_conserved(sizes: list[int]) -> None:
    n = len(sizes)
    network = network_of(workers(40))
    scatter, gather = network.reduce_scatter(sizes, range(n)), network.all_gather(sizes, range(n))
    assert scatter.sent.tolist() == [sum(sizes) - size for size in sizes]
    assert gather.sent.tolist() == [(n - 1) * size for size in sizes]
    assert int(scatter.sent.sum()) == int(gather.sent.sum()) == (n - 1) * sum(sizes)
    for transfer in (scatter, gather):
        assert transfer.senders.tolist() == list(range(n))


@pytest.mark.parametrize(("shares", "nodes"), [([1], [0, 1]), ([1, -1], [0, 1]), ([1, 1], [0, 0])])
def test_shares_and_nodes_must_fit(shares: list[int], nodes: Any) -> None:
    with pytest.raises(ValueError, match=r"slices for|bytes|different nodes"):
        network_of(workers(2)).reduce_scatter(shares, nodes)
