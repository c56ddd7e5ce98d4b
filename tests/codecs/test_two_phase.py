"""Packets by way of owners: the mean, what it may be off, what is kept, what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import OSP, Codec, DiLoCo, ErrorFeedback, Quantize, TopK
from offbeat.codecs import Stream
from offbeat.codecs.all_reduce import MeanAllReduce
from offbeat.codecs.quantize import CHUNK
from offbeat.codecs.two_phase import TwoPhaseStream
from offbeat.core.blocks import Layout
from offbeat.core.partition import even_slices
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.worlds.virtual.collectives import Result
from tests.support.coding import draw
from tests.support.diloco_bowls import SIZE, Bowls
from tests.support.exchanges import equal_workers, virtually
from tests.support.virtual_runs import close, cluster_of, play

pytestmark = pytest.mark.virtual


async def averaged(
    port: Port, codec: Codec, rounds: list[list[Tensor]], kept: list[Tensor] | None = None, **more: Any
) -> list[Tensor]:
    """What each round's mean is to this worker; and, if asked for, all that is kept in the end."""
    stream, means = codec.stream(rounds[0][0], **more), []
    for drawn in rounds:
        mean = drawn[port.rank].clone()
        reduction = MeanAllReduce([stream], codec)
        reduction.start(mean, port, 0)
        await reduction.finish(port)
        means.append(mean)
    if kept is not None:
        kept.append(all_kept(codec, stream, port))
    return means


def all_kept(codec: Any, stream: Stream, port: Port) -> Tensor:
    """This worker's part of what later means will have: of its own tensor, and of the mean that it owns."""
    residual, relay = stream.memory, stream.memory.inner
    total = residual.error / port.world
    if isinstance(relay, TwoPhaseStream) and port.world > 2:
        even_slices(total, port.world, codec.codec.grain)[port.rank].add_(relay.owned.error)
    return total


def of(world: int, numel: int, count: int = 1) -> list[list[Tensor]]:
    return [[draw(100 * k + rank, numel, "normal") for rank in range(world)] for k in range(count)]


# --- the mean


@settings(max_examples=25, deadline=None)
@given(
    world=st.integers(3, 6),
    numel=st.integers(1, 5000),
    bits=st.sampled_from([8, 4]),
    stochastic=st.booleans(),
)
def test_the_mean_is_off_by_both_ways(world: int, numel: int, bits: int, stochastic: bool) -> None:
    """Each way by half a step, or by a whole one, of the chunk's largest; and it is the same for all."""
    codec = Quantize(bits, stochastic=stochastic)
    rounds = of(world, numel)
    seen = [means[0] for means, _ in virtually(averaged, equal_workers(world), codec, rounds)]
    assert all(torch.equal(mean, seen[0]) for mean in seen)
    mean = torch.stack(rounds[0]).double().mean(0)
    part = (1.0 if stochastic else 0.5) / codec.levels
    for low in range(0, numel, CHUNK[bits]):
        chunk = slice(low, low + CHUNK[bits])
        there = part * torch.stack([x[chunk].abs().max() for x in rounds[0]]).double().mean()
        back = part * (mean[chunk].abs().max() + there)
        assert (seen[0][chunk] - mean[chunk]).abs().max() <= 1.00001 * (there + back)


@pytest.mark.parametrize("numel", [1, 1024, 1025, 4096])
def test_where_there_is_little_some_own_nothing(numel: int) -> None:
    rounds = of(5, numel, 2)
    for means, _ in virtually(averaged, equal_workers(5), ErrorFeedback(Quantize(8)), rounds):
        for mean, drawn in zip(means, rounds, strict=True):
            torch.testing.assert_close(mean, torch.stack(drawn).mean(0), rtol=0, atol=0.05)


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("bits", [8, 1])
def test_nothing_is_lost_only_late(world: int, bits: int) -> None:
    """All means that were, and what is kept by all, add up to all that there was."""
    rounds, kept = of(world, 5000, 6), list[Tensor]()
    codec = ErrorFeedback(Quantize(bits))
    runs = virtually(averaged, equal_workers(world), codec, rounds, kept)
    assert len(kept) == world
    everything = torch.stack([torch.stack(drawn).double().mean(0) for drawn in rounds]).sum(0)
    arrived = torch.stack(runs[0][0]).double().sum(0)
    torch.testing.assert_close(arrived + sum(kept), everything, rtol=0, atol=1e-5)
    assert (arrived - everything).abs().max() > 1e-3, "a part of it is late"


def test_what_is_kept_stays_bounded() -> None:
    """With 4 bits a way loses 1/14 of the largest at most. So a worker keeps X/13 at most of tensors up to X,
    and of means of what was decoded, up to 14/13 · 15/14 X, their owner keeps another 1/13."""
    kept, rounds = list[Tensor](), of(5, 2000, 60)
    virtually(averaged, equal_workers(5), ErrorFeedback(Quantize(4)), rounds, kept)
    largest = max(x.abs().max().item() for drawn in rounds for x in drawn)
    most = torch.stack(kept).sum(0).abs().max().item()
    assert 0.01 * largest < most <= (1 / 13 + 15 / 169) * largest


def test_what_is_not_finite_spoils_one_mean_and_no_other() -> None:
    rounds = of(4, 3000, 4)
    rounds[1][2][1500] = torch.nan
    for means, _ in virtually(averaged, equal_workers(4), ErrorFeedback(Quantize(8)), rounds):
        assert [bool(mean.isfinite().all()) for mean in means] == [True, False, True, True]
        torch.testing.assert_close(means[3], torch.stack(rounds[3]).mean(0), rtol=0, atol=0.05)


# --- what is sent


@pytest.mark.parametrize("world", [3, 4, 8, 16])
def test_a_ring_of_packets_leaves_a_nic(world: int) -> None:
    numel = 1024 * world * 5
    packet = numel + 4 * 5 * world
    for _, entry in virtually(averaged, equal_workers(world), Quantize(8), of(world, numel)):
        assert entry.bytes_sent == 2 * (world - 1) * packet // world
        assert entry.seconds == close(entry.bytes_sent / 1e6)


@pytest.mark.parametrize(("codec", "more"), [(Quantize(8), {"single_phase": True}), (TopK(0.1), {})])
def test_some_go_one_way_to_all(codec: Codec, more: dict[str, Any]) -> None:
    async def sent(port: Port, codec: Codec, x: Tensor) -> list[Tensor]:
        return await averaged(port, codec, [[x] * port.world], **more)

    for _, entry in virtually(sent, equal_workers(4), codec, draw(1, 10_240, "normal")):
        assert entry.bytes_sent == 3 * codec.nbytes(10_240, torch.float32)


# --- behind computation


@pytest.mark.parametrize("codec", [Quantize(8), ErrorFeedback(Quantize(4))], ids=str)
def test_osp_leaves_nothing_to_travel_where_it_lands(codec: Any) -> None:
    """Nobody would be there to turn it before."""
    model = torch.nn.Linear(64, 64)
    replica = Replica(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), layout=Layout(64, 64))
    streams: list[Any] = OSP(codec=codec).init(replica).deferred.reduction.streams
    assert len(streams) == len(replica.blocks)
    inner = [stream.memory.inner if isinstance(codec, ErrorFeedback) else stream for stream in streams]
    assert not any(isinstance(stream, TwoPhaseStream) for stream in inner)


@pytest.mark.parametrize(("delay", "exposed"), [(0, 2), (1, 1), (2, 0), (3, 0), (6, 0)])
def test_diloco_hides_both_ways_in_its_delay(delay: int, exposed: int) -> None:
    """Each is hidden by a step; it takes two to hide both. All of 40 weights have one owner."""
    way_s = 3 * (SIZE + 8) / 1e6
    strategy = DiLoCo(period=8, delay=delay, codec=ErrorFeedback(Quantize(8)))
    run = play(cluster_of(*[1.1 * way_s] * 4), strategy, 16, task=Bowls())
    assert run.each("wait_s") == [close(2 * exposed * way_s)] * 4
    assert run.each("communicate_s") == [close(2 * 2 * way_s)] * 4


def test_lanes_stay_apart() -> None:
    async def both(port: Port) -> list[Tensor]:
        codec, x = Quantize(8), draw(port.rank, 8192, "normal")
        streams = [codec.stream(x, lane=lane) for lane in Lane]
        tensors = [x.clone(), x.clone()]
        reduction = MeanAllReduce(streams, codec)
        for number, tensor in enumerate(tensors):
            reduction.start(tensor, port, number)
        return await reduction.finish(port)

    for (front, back), _ in virtually(both, equal_workers(3)):
        assert torch.equal(front, back)


# --- many workers in one process


@pytest.mark.parametrize(
    ("codec", "calls"),
    [(TopK(0.1), 5), (ErrorFeedback(TopK(0.1, chunk=64, bits=2)), 5), (Quantize(8), 5 * 5 + 5)],
    ids=str,
)
def test_virtual_workers_decode_what_is_alike_once_for_all(
    codec: Codec, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of owners each still decodes the packets of its own slice."""
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    decoded = []

    def count(method: str) -> None:
        usual = getattr(type(inner), method)

        def counted(self: Codec, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
            decoded.append(factor > 0)
            usual(self, packet, into, *([factor] if method == "accumulate" else []))

        monkeypatch.setattr(type(inner), method, counted)

    count("decode" if isinstance(inner, Quantize) else "accumulate")
    if isinstance(inner, Quantize):
        count("accumulate")
    cluster, rounds = equal_workers(5), of(5, 3000)
    together = virtually(averaged, cluster, codec, rounds)
    assert sum(decoded) == calls
    monkeypatch.setattr(Result, "fill_once", Pending.fill_once)
    alone = virtually(averaged, cluster, codec, rounds)
    assert all(torch.equal(mean, own) for ([mean], _), ([own], _) in zip(together, alone, strict=True))
