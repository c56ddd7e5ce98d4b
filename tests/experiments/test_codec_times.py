"""Seconds per byte of codecs and shards: counted as virtual time counts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat import Codec, ErrorFeedback, Half, PowerSGD, Quantize, TopK
from offbeat.core.pending import block_on
from offbeat.core.port import Lane
from offbeat.experiments.codec_times import InstantPort, time_codec, time_shard


@pytest.mark.parametrize(
    "codec", [Half(), ErrorFeedback(TopK(0.1)), Quantize(bits=4), ErrorFeedback(PowerSGD(rank=2))], ids=str
)
def test_every_codec_can_be_timed(codec: Codec) -> None:
    cost = time_codec(codec, nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 8)), world=4)
    assert cost.codec == str(codec)
    assert 0 < cost.encode_s < 1
    assert 0 < cost.decode_s < 1


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
