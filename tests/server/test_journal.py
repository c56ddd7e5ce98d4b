"""What a server writes into its journal."""

from __future__ import annotations

import torch

from offbeat import ASP
from offbeat.server.journal import Effect, EffectKind
from offbeat.server.messages import Join, Leave, Pull, Push
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState


def test_every_change_of_the_weights_and_clocks_is_written_once() -> None:
    written: list[Effect] = []
    server = ParameterServer(ShardState([torch.zeros(2)]), ASP().server_half())
    server.aggregation.journal = written.append
    update = [torch.ones(2)]
    server.handle(Join(worker=3))
    server.handle(Push(worker=3, clock=1, update=update))
    server.handle(Push(worker=3, clock=1, update=update))  # sent again
    server.handle(Pull(worker=3, clock=1))
    server.handle(Push(worker=3, clock=2, update=[torch.full((2,), torch.nan)]))
    server.handle(Leave(worker=3))
    assert [(effect.kind, effect.clocks) for effect in written] == [
        (EffectKind.CLOCKS, {3: 0}),
        (EffectKind.APPLY, {3: 1}),
        (EffectKind.CLOCKS, {3: 2}),
    ]
    assert written[1].update is update


def test_two_kinds_have_an_update() -> None:
    assert [kind.name for kind in EffectKind if kind.has_update] == ["APPLY", "GATHER"]
