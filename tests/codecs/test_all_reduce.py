"""Every codec on real ranks: the same weights everywhere, bytes as counted by hand, stop and go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat import (
    BSP,
    SSP,
    BFloat16,
    Codec,
    DiLoCo,
    ErrorFeedback,
    Half,
    LocalSGD,
    PowerSGD,
    Quantize,
    RandomK,
    TopK,
)
from tests.conformance.features import spoilt
from tests.conformance.hand_counts import ring
from tests.support import loops
from tests.support.beside import lightly
from tests.support.both_worlds import job_of, really, virtually
from tests.support.limits import HANG_S
from tests.support.resumed import resumed_run, straight_run

STEPS = 6
# A block of (20·64 + 64) + (64·32 + 32) + (32·5 + 5) weights, each parameter from a multiple of 16 on.
NUMEL = 1280 + 64 + 2048 + 32 + 160 + 16
MARKS = 6 * 4


def _factors(world: int) -> int:
    """Two columns for each side of the matrices; vectors travel whole, with the first side."""
    return ring(4 * (2 + 1) * (64 + 32 + 5), world) + ring(4 * 2 * (20 + 64 + 32), world)


def _relayed(*packets: int) -> Callable[[int, int], int]:
    """By the packets of the four stretches that four ranks own: a rank sends the others theirs, and the mean
    of its own to all. One of two sends all of them to the other."""
    return lambda world, rank: sum(packets) + (0 if world == 2 else 2 * packets[rank])


# what a rank of 2 or 4 sends in a step, without marks
SENT: dict[Codec, Callable[[int, int], int]] = {
    TopK(0.1, sampled=False): lambda world, _: (world - 1) * 360 * 6,
    RandomK(0.1): lambda world, _: ring(360 * 4, world),
    ErrorFeedback(Quantize(8)): _relayed(1024 + 4, 1024 + 4, 1024 + 4, 528 + 4),
    ErrorFeedback(Quantize(4, stochastic=True)): _relayed(*[448 + 7 * 4] * 3, 456 + 8 * 4),
    ErrorFeedback(Quantize(1)): _relayed(128 + 4, 128 + 4, 128 + 4, 66 + 4),
    Half(): lambda world, _: ring(2 * NUMEL, world),
    BFloat16(): lambda world, _: ring(2 * NUMEL, world),
    ErrorFeedback(PowerSGD(2)): lambda world, _: _factors(world),
}


pytestmark = pytest.mark.processes


every_codec = pytest.mark.parametrize("codec", SENT, ids=str)


def aligned(seed: int) -> nn.Module:
    """Nothing lies between its parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16))


def _aligned(strategy: Any) -> dict[str, torch.Tensor]:
    return loops.tensors(loops.attached(dist.get_rank(), strategy, "sgd", STEPS, model=aligned)[0])


@pytest.mark.parametrize("make", [BSP, LocalSGD])
def test_a_model_without_gaps(crew, make: Any) -> None:
    one, other = crew(2).run(_aligned, make(codec=ErrorFeedback(TopK(0.1))))
    assert (make is LocalSGD) or loops.equal(one, other)


def _trained(codec: Codec) -> tuple[dict[str, torch.Tensor], Any]:
    model, metrics = loops.attached(dist.get_rank(), BSP(codec=codec), "momentum", STEPS)
    return loops.tensors(model), metrics


@every_codec
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_and_bytes_are_counted(crew, codec: Codec, world: int) -> None:
    results = crew(world).run(_trained, codec)
    assert NUMEL == 3600
    for rank, (weights, metrics) in enumerate(results):
        assert loops.equal(weights, results[0][0])
        assert metrics.bytes_sent == STEPS * (SENT[codec](world, rank) + ring(MARKS, world))
        assert metrics.sync_steps == STEPS


@every_codec
def test_virtual_weights_are_the_real_ones(crew, codec: Codec) -> None:
    for strategy in (BSP(codec=codec), LocalSGD(period=3, codec=codec)):
        job = job_of(strategy, 4)
        virtual, real = virtually(job), really(crew(4), job)
        assert virtual.same_weights(real)
        sent = [entry.bytes_sent for entry in virtual.entries]
        assert sent == [entry.bytes_sent for entry in real.entries]


@every_codec
def test_resumed_equals_never_stopped(crew, codec: Codec) -> None:
    """With what was kept, drawn and factored so far."""
    strategy = BSP(codec=codec)
    straight = crew(2).run(straight_run, strategy, "momentum")
    stopped = crew(2).run(resumed_run, strategy, "momentum", 4)
    assert all(map(loops.equal, straight, stopped))


@pytest.mark.parametrize("make", [BSP, LocalSGD, DiLoCo])
def test_what_an_owner_keeps_of_its_means_is_in_the_checkpoint(crew, make: Any) -> None:
    """Of more than two ranks, each owns a stretch; 4 bits lose enough to be missed."""
    strategy = make(codec=ErrorFeedback(Quantize(4)), **({} if make is BSP else {"period": 2}))
    straight = crew(3).run(straight_run, strategy, "momentum")
    stopped = crew(3).run(resumed_run, strategy, "momentum", 4)
    assert all(map(loops.equal, straight, stopped))


def _overflowing(codec: Codec) -> tuple[dict[str, torch.Tensor], float]:
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = loops.batches(rank, STEPS)
    with offbeat.attach(model, optimizer, BSP(codec=codec), timeout_s=HANG_S):
        loops.train(model, optimizer, spoilt(data, 2) if rank else data, scaler=scaler)
    return loops.tensors(model), scaler.get_scale()


@every_codec
def test_an_overflow_on_one_rank_is_seen_by_all(crew, codec: Codec) -> None:
    (one, scale), (other, scale_there) = crew(2).run(_overflowing, codec)
    assert scale == scale_there == 512.0
    assert loops.equal(one, other)
    assert all(tensor.isfinite().all() for tensor in one.values())


@pytest.mark.parametrize("codec", [TopK(1.0), RandomK(1.0), PowerSGD(64)], ids=str)
def test_a_codec_that_loses_nothing_is_bsp(crew, codec: Codec) -> None:
    plain = crew(2).run(_trained, None)
    ours = crew(2).run(_trained, codec)
    assert loops.equal(plain[0][0], ours[0][0])


def _served(codec: Codec) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # every rank a host, with a shard of 1800 weights
        strategy = SSP(staleness=1, codec=codec)
        return loops.attached(dist.get_rank(), strategy, "momentum", STEPS)[1]


@pytest.mark.parametrize(
    ("codec", "packet"),
    [
        (ErrorFeedback(TopK(0.1)), 180 * 6),
        (RandomK(0.1), 8 + 180 * 4),
        (Quantize(8), 1800 + 2 * 4),
        (Half(), 2 * 1800),
    ],
    ids=str,
)
def test_bytes_of_pushes_to_a_server(crew, codec: Codec, packet: int) -> None:
    """A packet to the other shard a step, and this shard's answers, the last still under way."""
    for metrics in crew(2).run(lightly, _served, codec):
        assert metrics.bytes_left_host == STEPS * packet + (STEPS - 1) * 1800 * 4
        assert metrics.refused == 0
