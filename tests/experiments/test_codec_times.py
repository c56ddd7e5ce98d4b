"""Seconds per byte of codecs and shards: counted as virtual time counts them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from offbeat import Codec, ErrorFeedback, Half, PowerSGD, Quantize, TopK
from offbeat.core.pending import block_on
from offbeat.core.port import Lane
from offbeat.experiments.codec_times import (
    REPEATS,
    CodecTimes,
    InstantPort,
    codec_cost_of,
    time_codec,
    time_shard,
)


@pytest.mark.parametrize(
    "codec", [Half(), ErrorFeedback(TopK(0.1)), Quantize(bits=4), ErrorFeedback(PowerSGD(rank=2))], ids=str
)
def test_every_codec_can_be_timed(codec: Codec) -> None:
    times = time_codec(codec, nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 8)), world=4)
    assert len(times.encode_s) == len(times.decode_s) == REPEATS
    cost = codec_cost_of([times, times])
    assert cost.codec == str(codec)
    assert 0 < cost.encode_s < 1
    assert 0 < cost.decode_s < 1
    assert 0 < cost.deviation <= 1


def test_a_codec_costs_what_the_middle_of_all_ranks_takes() -> None:
    ranks = [CodecTimes("half", [1e-9, 1e-9], [4e-9]), CodecTimes("half", [4e-9, 4e-9], [2e-9])]
    cost = codec_cost_of(ranks)
    assert (cost.codec, cost.encode_s, cost.decode_s) == ("half", pytest.approx(2.5e-9), pytest.approx(3e-9))
    assert cost.deviation == pytest.approx(math.log(2) * math.sqrt(4 / 3)), "of 1, 1, 4, 4 ns"
    assert codec_cost_of(ranks[:1]).deviation == 0
    assert codec_cost_of([CodecTimes("none", [0.0], [0.0])]).deviation == 0, "nothing was encoded"


def test_a_shard_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    crowded = time_shard(nn.Linear(30, 20), world=2)
    assert 0 < crowded.apply_s < 1
    assert crowded.beside == 1


def test_the_port_counts_what_is_encoded_and_decoded() -> None:
    port = InstantPort(3)
    packets = [torch.full((100,), float(rank)) for rank in range(3)]
    block_on(_gather(port, packets))
    assert (port.encoded, port.decoded) == (400, 1200)
    assert all(torch.equal(packet, packets[0]) for packet in packets)


async def _gather(port: InstantPort, packets: list[torch.Tensor]) -> None:
    await port.all_gather(packets, Lane.FRONT)
