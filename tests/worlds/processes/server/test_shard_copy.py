"""A copy of another shard: it follows, is given back by its identity, and to nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbeat.server.journal import Effect, EffectKind
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.copy_wire import send_effect, send_state
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.wire import MessageType
from tests.support import beside
from tests.support.shards import SIZES, Hand, of, shard_of


@pytest.fixture
def second(tmp_path: Path) -> ShardServer:
    config = beside.post(tmp_path, SIZES)
    follows: dict[str, Any] = {"sizes": SIZES, "optimizer": None}
    return ShardServer(replace(config, second=1, follows=follows), dist.HashStore(), b"secret")


def recovered(second: ShardServer, identity: int) -> tuple[int, list[float]]:
    """The identity of what is given back, and its weights."""
    asking = Hand(second, 0, clock=None)
    asking.say(MessageType.RECOVER, identity)
    kind, found, count, _ = asking.hear()
    assert kind == MessageType.COPY
    weights = of(0.0) if found else []
    asking.link.receive(torch.zeros(2 * count, dtype=torch.int64), *weights)
    asking.link.close()
    return found, [float(part[0]) for part in weights]


def test_a_copy_follows_and_is_given_back_by_its_identity(second: ShardServer) -> None:
    assert recovered(second, 7) == (0, []), "there is none yet"
    shard = Hand(second, 0, clock=None)
    send_state(shard.link, 7, ShardState(of(3.0), {5: 2}))
    assert shard.hear()[:2] == [MessageType.EFFECT_ACK, 0]
    send_effect(shard.link, 1, Effect(kind=EffectKind.APPLY, clocks={5: 3}, update=of(0.5)))
    assert shard.hear()[:2] == [MessageType.EFFECT_ACK, 1]
    assert recovered(second, 8) == (0, []), "it is another one's"
    assert recovered(second, 7) == (7, [3.5, 3.5])
    assert shard.refused(), "what comes from before is not followed any more"


def test_a_shard_that_keeps_no_copies_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shard = shard_of(tmp_path)
    hand = Hand(shard, 0, clock=None)
    hand.say(MessageType.RECOVER, 1)
    assert hand.refused()
    assert "RECOVER, but this shard keeps no copies" in caplog.text
