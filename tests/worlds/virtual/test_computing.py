"""What codecs and shards compute is charged: closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offbeat import ASP, BSP, SSP, Half, TopK
from offbeat.core.port import Signature
from offbeat.worlds.virtual.cluster import ServerMachines
from offbeat.worlds.virtual.computing import ENCODING, Core, packet_bytes
from offbeat.worlds.virtual.costs import CodecCost, ShardCost
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.random_numbers import lognormal
from offbeat.worlds.virtual.scheduler import Scheduler
from tests.support.exchanges import equal_workers
from tests.support.virtual_runs import (
    BYTES_PER_S,
    MARKED,
    WEIGHTS,
    AnyStrategy,
    close,
    cluster_of,
    play,
    ring_s,
)
from tests.support.virtual_servers import ASK_S, ONE_NIC, SEND_S, STEPS, WIDE

pytestmark = pytest.mark.virtual

APPLY_S = 1e-6  # a byte: a push of WEIGHTS bytes takes as long as sending it
SLOW_SHARD = ShardCost(apply_s=APPLY_S)
WORK_S = APPLY_S * WEIGHTS


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pushes_wait_for_each_other_at_a_shard(world: int) -> None:
    """All push at once, and arrive together; the shard applies one after the other, then answers all."""
    cluster = cluster_of(*[0.05] * world, server=ONE_NIC, shards=SLOW_SHARD)
    run = play(cluster, SSP(staleness=0), STEPS)
    assert world * ASK_S < WORK_S, "all have asked before the last push is applied"
    assert run.seconds == close(STEPS * (0.05 + world * (SEND_S + WORK_S + SEND_S)))


def test_each_shard_has_a_queue_of_its_own() -> None:
    """Two shards behind fast links: each applies half of each push, at the same time as the other."""
    fast = ServerMachines(up_bits_per_s=1e15, down_bits_per_s=1e15, count=2)
    cluster = cluster_of(0.05, 0.05, server=fast, shards=SLOW_SHARD)
    run = play(cluster, SSP(staleness=0), STEPS)
    assert run.seconds == close(STEPS * (0.05 + SEND_S + 2 * WORK_S / 2 + SEND_S))


def test_a_shard_takes_time_from_the_worker_beside_it() -> None:
    """While worker 1 computes its first long step, its shard applies all pushes of worker 0."""
    cluster = cluster_of(0.05, 2.0, shards=SLOW_SHARD)
    alone = play(cluster, ASP(overlap=False), STEPS)
    shared = play(replace(cluster, shards=ShardCost(apply_s=APPLY_S, beside=0.5)), ASP(overlap=False), STEPS)
    assert alone.ledgers[0].seconds < 2.0
    longer_s = shared.ledgers[1].seconds - alone.ledgers[1].seconds
    assert longer_s == close(0.5 * STEPS * WORK_S / 2)
    assert all(map(torch.equal, shared.weights, alone.weights))


@pytest.mark.parametrize("strategy", [SSP(staleness=0), ASP(), ASP(overlap=False)], ids=str)
def test_an_exchange_takes_time_from_the_worker_itself(strategy: ASP | SSP) -> None:
    """Each step but the first is longer by what the exchange before it takes."""
    cluster = cluster_of(0.5, server=ONE_NIC)
    free = play(cluster, strategy, STEPS)
    run = play(replace(cluster, shards=ShardCost(exchange_s=APPLY_S)), strategy, STEPS)
    longer_s = (STEPS - 1) * 2 * WORK_S
    assert run.seconds == close(free.seconds + longer_s)
    assert run.each("compute_s")[0] == close(free.each("compute_s")[0] + longer_s)
    assert all(map(torch.equal, run.weights, free.weights))


def test_an_exchange_takes_as_much_from_the_worker_beside_the_shard() -> None:
    """While worker 1 computes its first long step, its shard exchanges half of all that worker 0 has."""
    cluster = cluster_of(0.05, 4.0)
    free = play(cluster, ASP(overlap=False), STEPS)
    run = play(replace(cluster, shards=ShardCost(exchange_s=APPLY_S)), ASP(overlap=False), STEPS)
    assert run.ledgers[0].seconds < 4.0
    of_others_s, of_its_own_s = STEPS * WORK_S, (STEPS - 1) * 2 * WORK_S
    longer_s = run.ledgers[1].seconds - free.ledgers[1].seconds
    assert longer_s == close(of_others_s + of_its_own_s)
    assert all(map(torch.equal, run.weights, free.weights))


def test_others_take_half_of_a_worker_s_time_at_most() -> None:
    """Shards beside it that have far more to do than there is time for do not hold it up for ever."""
    scheduler = Scheduler(Network(equal_workers(1)))
    core, late_s = Core(scheduler, 0), []

    async def work() -> None:
        late_s.append(await core.compute(1.0))

    scheduler.spawn("worker", work())
    for number in range(1, 400):
        scheduler.at(0.01 * number, lambda: core.take(1.0))
    scheduler.run()
    assert 0.9 < late_s[0] <= 1.0


ENCODE_S, DECODE_S = 2e-6, 3e-6


@pytest.mark.parametrize("world", [2, 4])
def test_a_codec_on_a_ring(world: int) -> None:
    """The step, the packet encoded, around the ring and decoded; the marks travel while it is decoded."""
    codec = Half()
    cost = CodecCost(codec=str(codec), encode_s=ENCODE_S, decode_s=DECODE_S)
    free = play(cluster_of(*[0.05] * world), BSP(codec=codec), STEPS)
    run = play(cluster_of(*[0.05] * world, codecs=(cost,)), BSP(codec=codec), STEPS)
    packet, marks_s = WEIGHTS // 2, ring_s(MARKED - WEIGHTS, world)
    assert free.seconds == close(STEPS * (0.05 + ring_s(packet, world) + marks_s))
    assert marks_s < DECODE_S * packet
    packet_s = (ENCODE_S + DECODE_S) * packet + ring_s(packet, world)
    assert run.seconds == close(STEPS * (0.05 + packet_s))
    assert all(map(torch.equal, run.weights, free.weights))
    assert run.each("bytes_sent") == free.each("bytes_sent")
    assert run.each("compute_s")[0] > free.each("compute_s")[0]


def test_what_decoding_costs_each_worker_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, decoded, usual = TopK(0.1), [], TopK.accumulate

    def counted(self: TopK, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        decoded.append(factor)
        usual(self, packet, into, factor)

    monkeypatch.setattr(TopK, "accumulate", counted)
    cost = CodecCost(codec=str(codec), decode_s=DECODE_S)
    run = play(cluster_of(*[0.05] * 4, codecs=(cost,)), BSP(codec=codec), STEPS)
    assert len(decoded) == 4 * STEPS, "each packet once, not once by each worker"
    free = play(cluster_of(*[0.05] * 4), BSP(codec=codec), STEPS)
    assert run.each("compute_s")[3] > free.each("compute_s")[3]


def test_a_codec_of_pushes() -> None:
    """The worker encodes, one after the other leaves, and the shard decodes and applies in its queue."""
    codec = Half()
    cost = CodecCost(codec=str(codec), encode_s=ENCODE_S, decode_s=DECODE_S)
    cluster = cluster_of(0.05, 0.05, server=ONE_NIC, shards=SLOW_SHARD, codecs=(cost,))
    run = play(cluster, SSP(staleness=0, codec=codec), STEPS)
    packet = WEIGHTS // 2
    push_s = ENCODE_S * packet + 2 * packet / BYTES_PER_S + 2 * (DECODE_S * packet + WORK_S)
    assert run.seconds == close(STEPS * (0.05 + push_s + 2 * SEND_S))


@pytest.mark.parametrize("strategy", [BSP(codec=Half()), SSP(staleness=0, codec=Half())], ids=str)
def test_encoding_takes_longer_and_shorter_by_turns(strategy: AnyStrategy) -> None:
    """A step waits for the slowest worker's packet: the largest factor of all, each drawn by its number."""
    deviation, world = 0.5, 3
    cost = CodecCost(codec=str(Half()), encode_s=ENCODE_S)
    steady, uneven = (
        play(cluster_of(*[0.05] * world, server=WIDE, codecs=(each,)), strategy, STEPS)
        for each in (cost, replace(cost, deviation=deviation))
    )
    factors = [
        max(lognormal(deviation, ENCODING, rank, step) for rank in range(world))
        for step in range(1, STEPS + 1)
    ]
    longer_s = sum(factor - 1 for factor in factors) * ENCODE_S * (WEIGHTS // 2)
    assert uneven.seconds - steady.seconds == pytest.approx(longer_s, rel=1e-6)
    assert all(map(torch.equal, uneven.weights, steady.weights))


def test_what_is_encoded_and_decoded() -> None:
    assert packet_bytes(Signature("all_gather", "slices", (100, 200)), 1) == (200, 300)
    assert packet_bytes(Signature("all_reduce", "mean", (100,)), 1) == (100, 100)
    assert packet_bytes(Signature("all_reduce", "max", (8,)), 0) == (0, 0), "control traffic"
    assert packet_bytes(Signature("broadcast", "0", (100,)), 0) == (0, 0)
