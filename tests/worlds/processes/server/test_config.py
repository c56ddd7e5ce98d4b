"""Specifications of a server: divided into shards without loss, and believed only with the right token."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offbeat import GSSP, SSP, Quantize
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError
from offbeat.server.optimizer_spec import spec_of
from offbeat.server.pieces import LEAST_S
from offbeat.strategies.gssp import GDTopK
from offbeat.worlds.processes.server.auth import sign
from offbeat.worlds.processes.server.config import MOST_NUMEL, SPEC, ServerSpec, ShardConfig

WHERE: dict[str, Any] = {
    "host": "127.0.0.1",
    "tcp_port": 9,
    "prefix": "mine",
    "workers": 2,
    "local_workers": [0],
    "snapshot": "nowhere",
    "snapshot_s": 1.0,
}


@pytest.fixture
def replica() -> Replica:
    model = nn.Linear(30, 1)
    return Replica(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def of(replica: Replica) -> ServerSpec:
    return ServerSpec.of(SSP(staleness=2), replica, {"model": "Linear"}, timeout_s=60.0)


def test_a_specification_says_what_is_trained(replica: Replica) -> None:
    spec = of(replica)
    assert (spec.strategy, spec.settings["staleness"]) == ("ssp", 2)
    assert spec.flats == [("float32", replica.weights[0].numel())]
    assert (spec.optimizer, spec.state_parts) == (None, 0), "workers push updates"


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_hold_every_element_once(replica: Replica, shards: int) -> None:
    configs = [of(replica).shard_config(shard, shards, **WHERE) for shard in range(shards)]
    assert sum(config.sizes[0][1] for config in configs) == replica.weights[0].numel()
    assert [config.shard for config in configs] == list(range(shards))
    assert configs[0].parent == os.getpid()
    assert [part.numel() for part in configs[-1].buffers()] == [configs[-1].sizes[0][1]]
    assert configs[0].silence_s == 30.0, "half of what others would wait for it"
    assert configs[0].report_size == configs[0].state_parts == 0


def test_a_host_has_neighbouring_shards_and_their_copies_are_on_the_next_host(replica: Replica) -> None:
    where = {name: value for name, value in WHERE.items() if name != "snapshot"}
    hosts, pieces = 3, 2
    for host in range(hosts):
        config = of(replica).process_config(
            host, hosts, pieces, snapshots=Path("kept"), replicate=True, **where
        )
        told = ShardConfig(**json.loads(json.dumps(asdict(config)))).of_process()
        alone = [of(replica).shard_config(2 * host + k, 6, pieces, replicate=True, **WHERE) for k in (0, 1)]
        assert [shard.buffers()[0].numel() for shard in told] == [one.buffers()[0].numel() for one in alone]
        assert [shard.shard for shard in told] == [2 * host, 2 * host + 1]
        assert [shard.snapshot for shard in told] == [f"kept/shard-{shard.shard}" for shard in told]
        for shard, one in zip(told, alone, strict=True):
            assert shard.second == one.second == (shard.shard + pieces) % 6
            assert one.follows is not None
            before = of(replica).shard_config((shard.shard - pieces) % 6, 6, **WHERE)
            assert one.follows["sizes"] == before.sizes, "it keeps the copy of the host before"
            assert not shard.siblings


def test_a_large_model_is_cut_on_slow_links_unless_its_packets_depend_on_the_cut(replica: Replica) -> None:
    spec = replace(of(replica), flats=[("float32", 1 << 20), ("float16", 1 << 10)])
    slow, fast = 6e6, 1e9
    assert spec.pieces(hosts=4, workers=4, bytes_per_s=slow) == 16
    assert spec.pieces(hosts=4, workers=4, bytes_per_s=fast) == 1
    assert replace(spec, cuts_anywhere=False).pieces(hosts=4, workers=4, bytes_per_s=slow) == 1
    coded = ServerSpec.of(SSP(codec=Quantize(8)), replica, {}, 1.0)
    assert of(replica).cuts_anywhere and not coded.cuts_anywhere


def test_pieces_are_as_long_on_their_links_when_packets_are_smaller(replica: Replica) -> None:
    sparse = ServerSpec.of(GSSP(sparse=GDTopK(ratio=0.01)), replica, {}, 1.0)
    assert (of(replica).wire_ratio, sparse.wire_ratio) == (1, 0.5), "pulled weights are in half precision"
    dense, sparse = (replace(spec, flats=[("float32", 1 << 20)]) for spec in (of(replica), sparse))
    rate = (4 << 20) / 4 / 8 / LEAST_S
    assert dense.pieces(hosts=4, workers=4, bytes_per_s=rate) == 8
    assert sparse.pieces(hosts=4, workers=4, bytes_per_s=rate) == 4


def test_a_shard_with_the_optimizer_wants_rates_and_marks(replica: Replica) -> None:
    spec = replace(of(replica), optimizer=asdict(spec_of(replica)))
    config = spec.shard_config(0, 2, **WHERE)
    assert spec.state_parts == config.state_parts == 1, "the momentum"
    assert config.optimizer is not None
    assert config.report_size == len(config.optimizer["groups"]) + config.optimizer["marks"] > 0


def test_a_configuration_comes_back_from_a_command_line(replica: Replica) -> None:
    config = of(replica).shard_config(0, 2, **WHERE)
    again = ShardConfig(**json.loads(json.dumps(asdict(config))))
    assert [tuple(size) for size in again.sizes] == config.sizes
    assert replace(again, sizes=config.sizes) == config


def test_only_what_is_signed_with_the_token_is_believed(replica: Replica) -> None:
    signed = of(replica).signed(b"secret")
    read = ServerSpec.read(signed.encode(), b"secret")
    assert [tuple(flat) for flat in read.flats] == of(replica).flats
    assert read.description == of(replica).description and read.description["model"] == "Linear"
    for forged in (signed.replace('"staleness": 2', '"staleness": 3'), signed.partition(" ")[2]):
        with pytest.raises(OffbeatError, match="not signed with this token: check OFFBEAT_TOKEN"):
            ServerSpec.read(forged.encode(), b"secret")
    with pytest.raises(OffbeatError, match="not signed with this token"):
        ServerSpec.read(signed.encode(), b"guess")


def test_a_model_that_no_memory_holds_is_refused(replica: Replica) -> None:
    large = replace(of(replica), flats=[("float32", MOST_NUMEL + 1)])
    with pytest.raises(OffbeatError, match="describes a model that is too large"):
        ServerSpec.read(large.signed(b"secret").encode(), b"secret")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        "[" * 100_000,
        '{"flats": 3}',
        json.dumps(
            {
                "strategy": "asp",
                "settings": {},
                "flats": [["float32", "4"]],
                "optimizer": None,
                "description": {},
                "timeout_s": 1.0,
            }
        ),
        json.dumps(
            {
                "strategy": "asp",
                "settings": {},
                "flats": [["load", 4]],
                "optimizer": None,
                "description": {},
                "timeout_s": 1.0,
            }
        ),
    ],
)
def test_a_malformed_specification_is_refused_even_if_it_is_signed(text: str) -> None:
    with pytest.raises(OffbeatError, match="the specification of the server is malformed"):
        ServerSpec.read(sign(b"secret", SPEC, text).encode(), b"secret")
