"""A shard's state and the effects on it, as bytes between two shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offbeat.server.journal import Effect, EffectKind
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.copy_wire import receive_effect, receive_state, send_effect, send_state
from offbeat.worlds.processes.server.wire import FROM_SHARDS, MessageType, ProtocolError, read_header
from tests.support import beside
from tests.support.connections import close, connection_pair
from tests.support.shards import SIZES, of


def test_a_state_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    here, there = connection_pair()
    send_state(here, 7, ShardState(of(3.0), {5: 2, 1: 9}))
    kind, identity, count, _ = read_header(there, FROM_SHARDS)
    state = receive_state(there, count, beside.post(tmp_path, SIZES))
    assert (kind, identity, state.applied, state.optimizer) == (MessageType.COPY, 7, {5: 2, 1: 9}, [])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(state.weights, of(3.0), strict=True))
    close(here, there)


@pytest.mark.parametrize("kind", EffectKind)
def test_an_effect_comes_back_as_it_was_sent(kind: EffectKind) -> None:
    here, there = connection_pair()
    update = of(2.0) if kind.has_update else []
    report = (1.5, 2.5) if kind.has_update else ()
    effect = Effect(kind=kind, clocks={4: 8}, update=update, report=report, weight=0.1, factor=3.0)
    send_effect(here, 11, effect)
    header, what, count, number = read_header(there, FROM_SHARDS)
    received = receive_effect(there, what, count, of(0.0), 2)
    assert (header, number, received.kind, received.clocks) == (MessageType.EFFECT, 11, kind, {4: 8})
    assert (received.weight, received.factor, received.report) == (0.1, 3.0, report)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(update, received.update, strict=False))
    close(here, there)


def test_a_report_that_is_too_long_is_refused() -> None:
    here, there = connection_pair()
    send_effect(here, 1, Effect(kind=EffectKind.APPLY, update=of(1.0), report=(1.0, 2.0, 3.0)))
    _, what, count, _ = read_header(there, FROM_SHARDS)
    with pytest.raises(ProtocolError, match="a report of 3"):
        receive_effect(there, what, count, of(0.0), 2)
    close(here, there)
