"""Handover: a newcomer has all that the other worker has, and damage is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat import BSP, ErrorFeedback, LocalSGD, RandomK, TopK
from offbeat.codecs.error_feedback import Residual
from offbeat.core import handover
from offbeat.core.pending import block_on
from offbeat.core.replica import Replica
from offbeat.core.session import Session
from offbeat.errors import OffbeatError
from tests.support import loops
from tests.support.lone_port import NotingPort


def session(strategy: Any, seed: int) -> Session[Any]:
    model = loops.mlp(seed)
    model.register_buffer("seen", torch.full((3,), float(seed)))
    model.register_buffer("count", torch.tensor(seed))
    optimizer = loops.momentum(model)
    port: Any = NotingPort()
    return Session(strategy, Replica(model, "average", optimizer, strategy.layout(model)), port, port.ledger)


def trained(strategy: Any, seed: int, steps: int) -> Session[Any]:
    made = session(strategy, seed)
    model, optimizer = made.replica.model, made.replica.optimizer.optimizers[0]
    for x, y in loops.batches(seed, steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        for block in made.complete_gradients():
            made.block_ready(block)
        block_on(made.begin_step())
        optimizer.step()
        block_on(made.after_update(optimizer))
    return made


def test_newcomer_continues_as_the_other_does() -> None:
    strategy = LocalSGD(period=4, codec=ErrorFeedback(TopK(0.5)))
    member, newcomer = trained(strategy, 1, 6), trained(strategy, 2, 0)
    blob = block_on(handover.pack(member.conductor, 6))
    assert handover.unpack(newcomer.conductor, blob) == 6
    assert loops.equal(loops.tensors(member.replica.model), loops.tensors(newcomer.replica.model))
    assert newcomer.conductor.state.step == 6
    for one, other in zip(member.conductor.state.base, newcomer.conductor.state.base, strict=True):
        assert torch.equal(one, other)
    states = [each.replica.optimizer.optimizers[0].state_dict()["state"] for each in (member, newcomer)]
    assert states[0].keys() == states[1].keys()
    assert all(
        torch.equal(states[0][i]["momentum_buffer"], states[1][i]["momentum_buffer"]) for i in states[0]
    )
    newcomer.replica.keep_layout()


def test_damage_on_the_way_is_noticed() -> None:
    blob = block_on(handover.pack(trained(BSP(), 1, 1).conductor, 1))
    sent = handover.checksum(blob)
    handover.verify(blob, sent)
    damaged = blob.clone()
    damaged[-100] += 1
    with pytest.raises(OffbeatError, match="has the checksum"):
        handover.verify(damaged, sent)


@pytest.mark.parametrize("newcomer", [True, False])
def test_stored_errors_of_another_worker_are_not_sent_again(newcomer: bool) -> None:
    strategy = BSP(codec=ErrorFeedback(RandomK(0.5)))
    made = session(strategy, 1)
    for stream in made.conductor.state.gradients.reduction.streams:
        assert isinstance(stream.memory, Residual)
        stream.memory.error.fill_(3.0)
    state = made.conductor.state
    port: Any = made.port
    block_on(strategy.on_roster_change(state, made.replica, port, newcomer))
    errors = [stream.memory.error for stream in state.gradients.reduction.streams]
    assert all(bool((error == (0.0 if newcomer else 3.0)).all()) for error in errors)
