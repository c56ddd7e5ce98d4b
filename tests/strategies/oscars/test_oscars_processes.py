"""Oscars over real processes: planned by real clocks, steady when ranks are lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import Oscars
from offbeat.core.ledger import Ledger
from tests.conformance.hand_counts import weights
from tests.support import loops
from tests.support.beside import lightly
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.lost import patched
from tests.support.server_ranks import STEPS, Hire, exact_run, troubled_run

pytestmark = pytest.mark.processes

LOCK_STEP = Oscars(tau=1, limit=1, patience=1e6)  # one step a round, and nobody is late


def _paced(strategy: Oscars, steps: int, patch: pytest.MonkeyPatch) -> Any:
    """Rank 1 is said to compute four times as long, and both so long that no wait counts beside it."""
    rank = dist.get_rank()
    step_s = 4e3 if rank == 1 else 1e3
    patch.setattr(Ledger, "compute_s", property(lambda ledger: ledger.steps * step_s))
    model = loops.mlp()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        plans = []
        for batch in loops.batches(rank, steps if rank else 4 * steps):
            loops.train(model, optimizer, [batch], samples=sync.samples)
            plans.append(sync.metrics.planned_steps)
        return sync.metrics, plans


def test_the_fast_one_is_given_more_steps(crew: Hire) -> None:
    """Sixteen, to the slow one's four."""
    (fast, plans), (slow, plans_there) = crew(2).run(lightly, patched, _paced, Oscars(), 20)
    assert plans[0] == plans_there[0] == 1 and (max(plans), max(plans_there)) == (16, 4)
    assert fast.staleness_max <= 2 and slow.staleness_max <= 2


def _sent() -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # every rank a host
        model, metrics = loops.attached(dist.get_rank(), LOCK_STEP, "sgd", STEPS)
    return metrics.bytes_left_host, weights(model)


def test_bytes_equal_a_hand_count(crew: Hire) -> None:
    """Half of the weights are pushed to the other host's shard, and half of them are answered, each step."""
    for sent, nbytes in crew(2).run(lightly, _sent):
        assert sent == STEPS * nbytes


def test_resumed_in_lock_step_equals_never_stopped_to_the_bit(crew: Hire) -> None:
    straight = crew(2).run(lightly, exact_run, LOCK_STEP, None)
    stopped = crew(2).run(lightly, exact_run, LOCK_STEP, 6)
    for one, other in zip(straight, stopped, strict=True):
        assert torch.equal(one, other)


def _resumed_in_mid_round() -> tuple[bool, int]:
    """Save amid local steps, and load into another model: weights, plan and pace are there again."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, Oscars(), timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(rank, 5), samples=sync.samples)
        own, planned = loops.tensors(model), sync._session.conductor.state.planned
        saved = sync.state_dict()
    other = loops.mlp(7)
    optimizer = loops.sgd(other)
    with offbeat.attach(other, optimizer, Oscars(), timeout_s=HANG_S) as sync:
        sync.load_state_dict(saved)
        state = sync._session.conductor.state
        same = loops.equal(own, loops.tensors(other)) and state.planned == planned and state.step_s > 0
        loops.train(other, optimizer, loops.batches(rank, 20), samples=sync.samples)
        return same, sync.metrics.steps


def test_resumed_in_mid_round(crew: Hire) -> None:
    assert crew(2).run(lightly, _resumed_in_mid_round) == [(True, 20)] * 2


def test_the_others_train_on_without_one_who_was_killed() -> None:
    crew = Crew(3)
    try:
        crew.start(patched, troubled_run, Oscars(), "SIGKILL", 1)
        for well, outcome in crew.outcomes([0, 2]):
            assert well, outcome
            steps, nothing_left, told = outcome
            assert steps == STEPS
            assert "but rank 1 has not" in told
            assert nothing_left
    finally:
        crew.dismiss()


def _standing_still() -> Any:
    """After five steps rank 1 does nothing until rank 0 has done many more."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model = loops.mlp()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, Oscars(), timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(rank, 5))
        if rank == 0:
            loops.train(model, optimizer, loops.batches(rank, 120))
            store.set("rank 0 went on without", "")
        else:
            store.wait(["rank 0 went on without"])
            loops.train(model, optimizer, loops.batches(rank, 20))
        return sync.metrics


def test_nobody_waits_beyond_a_deadline(crew: Hire) -> None:
    """What the late one has made of weights of long ago is dropped, and it goes on from new ones."""
    there, late = crew(2).run(lightly, _standing_still)
    assert there.refused == 0 and late.refused >= 1
    assert (there.steps, late.steps) == (125, 25)


def _losses(tell: bool) -> int:
    rank = dist.get_rank()
    model = loops.mlp()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, Oscars(schedule="lengthen"), timeout_s=HANG_S) as sync:
        for inputs, targets in loops.batches(rank, 8):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            if tell:
                sync.loss(loss)
            loss.backward()
            optimizer.step()
        return sync.metrics.planned_steps


def test_a_schedule_by_the_loss_must_be_told_the_loss(crew: Hire) -> None:
    assert crew(1).run(lightly, _losses, True)[0] >= 4
    with pytest.raises(AssertionError, match=r"call sync\.loss"):
        crew(1).run(lightly, _losses, False)
