"""SelSync over processes: what its norm sees, what a skipped step does, and what it equals."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat import BSP, LocalSGD, SelSync
from tests.conformance import features
from tests.conformance.hand_counts import ring, weights
from tests.conformance.table import AnyStrategy
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

STEPS = 10


# --- the norm is of the gradients as backward leaves them


def _squares(feature: str) -> tuple[list[float], list[float]]:
    """‖g‖² as SelSync saw it, and as a hook just before the optimizer's step does."""
    wanted = features.FEATURES[feature]
    model = wanted.model(0)
    optimizer = loops.OPTIMIZERS[wanted.optimizer](model)
    seen: list[float] = []

    def look(*_: Any) -> None:
        seen.append(
            sum(float((p.grad.double() ** 2).sum()) for p in model.parameters() if p.grad is not None)
        )

    optimizer.register_step_pre_hook(look)
    with offbeat.attach(model, optimizer, SelSync(), timeout_s=HANG_S) as sync:
        features.loop(feature, model, model, 0, STEPS, optimizer=optimizer, no_sync=sync.no_sync)
        return sync._session.conductor.state.squares, seen


@pytest.mark.parametrize("feature", ["momentum", "accumulation", "mixed dtypes", "unused", "tied"])
def test_the_norm_is_of_the_whole_gradient(crew, feature: str) -> None:
    ours, seen = crew(1).run(_squares, feature)[0]
    assert ours == pytest.approx(seen, rel=1e-5)
    assert len(ours) == STEPS


def test_the_norm_is_taken_before_clipping_and_unscaling(crew) -> None:
    clipped, seen = crew(1).run(_squares, "clipping")[0]
    assert seen == pytest.approx([0.1**2] * STEPS, rel=1e-4), "nothing changes any more"
    plain, _ = crew(1).run(_squares, "momentum")[0]
    assert clipped[0] == pytest.approx(plain[0], rel=1e-5) and min(clipped) > 0.1**2
    scaled, _ = crew(1).run(_squares, "scaler")[0]
    assert scaled == pytest.approx([1024**2 * square for square in plain], rel=1e-5), "as steady"


def _sparse() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 5))
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, SelSync(), timeout_s=HANG_S) as sync:
        model(torch.tensor([[1, 1], [2, 3]])).sum().backward()  # row 1 twice: to be added up first
        expected = sum(float((p.grad.to_dense() ** 2).sum()) for p in model.parameters())
        optimizer.step()
        return [*sync._session.conductor.state.squares, expected]


def test_the_norm_of_sparse_gradients(crew) -> None:
    ours, expected = crew(1).run(_sparse)[0]
    assert ours == pytest.approx(expected, rel=1e-5)


def _closure() -> tuple[list[float], float]:
    model = loops.mlp()
    optimizer = loops.sgd(model)

    def closure() -> float:
        loss = model(torch.ones(2, 20)).sum()
        loss.backward()
        return float(loss)

    with offbeat.attach(model, optimizer, SelSync(), timeout_s=HANG_S) as sync:
        optimizer.step(closure)
        return sync._session.conductor.state.squares, sum(
            float(p.grad.square().sum()) for p in model.parameters()
        )


def test_the_norm_is_of_the_gradient_that_a_closure_computes(crew) -> None:
    ((squares, expected),) = crew(1).run(_closure)
    assert squares == [pytest.approx(expected)]


# --- an overflow on one rank


def _overflowing(strategy: AnyStrategy, at: int) -> tuple[Any, Any]:
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    data = loops.batches(rank, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, features.spoilt(data, at) if rank else data, scaler=scaler)
        with sync.consensus():
            pass
        return sync.metrics, sync._session.conductor.state


@pytest.mark.parametrize("aggregate", ["parameters", "gradients"])
@pytest.mark.parametrize("period", [1, 3])
def test_an_overflow_on_one_rank_makes_all_synchronize_once(crew, aggregate: str, period: int) -> None:
    """It is in step 7; with a period of 3 they ask in 6 and in 9."""
    strategy = SelSync(delta=1e9, window=3, aggregate=aggregate, period=period)
    (one, state), (other, state_there) = crew(2).run(_overflowing, strategy, 6)
    assert one.sync_steps == other.sync_steps == 3 + 1
    assert one.bytes_sent == other.bytes_sent
    assert state.step == state_there.step == STEPS
    assert all(math.isfinite(s.smoothed) and all(map(math.isfinite, s.squares)) for s in (state, state_there))


def _stopped_before_asking(strategy: AnyStrategy, at: int, stop: int) -> tuple[int, bool, int]:
    """Rank 1 overflows; all save, attach anew, go on. Averages before; whether it is kept; averages after."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    data = list(features.spoilt(loops.batches(rank, STEPS), at) if rank else loops.batches(rank, STEPS))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, data[:stop], scaler=scaler)
        saved, before = sync.state_dict(), sync.metrics.sync_steps
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        sync.load_state_dict(saved)
        kept = sync._session.conductor.state.changed
        loops.train(model, optimizer, data[stop:], scaler=scaler)
        return before, kept, sync.metrics.sync_steps


def test_a_change_that_waits_to_be_asked_for_is_in_the_checkpoint(crew) -> None:
    """The overflow is in step 5, the checkpoint after 6, and they ask in 7."""
    strategy = SelSync(delta=1e9, window=3, period=4)
    assert crew(2).run(_stopped_before_asking, strategy, 4, 6) == [(3, False, 1), (3, True, 1)]


def _own_gradients(at: int) -> list[bool]:
    """For each step, whether backward left this rank its very own gradient; rank 1 overflows in one."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = loops.batches(rank, STEPS)
    own = []
    with offbeat.attach(
        model, optimizer, SelSync(delta=1e9, window=3, aggregate="gradients"), timeout_s=HANG_S
    ):
        for x, y in features.spoilt(data, at) if rank else data:
            optimizer.zero_grad()
            loss = scaler.scale(nn.functional.cross_entropy(model(x), y))
            params = list(model.parameters())
            expected = torch.autograd.grad(loss, params, retain_graph=True)
            loss.backward()
            own.append(all(torch.equal(p.grad, g) for p, g in zip(params, expected, strict=True)))
            scaler.step(optimizer)
            scaler.update()
    return own


def test_what_ends_a_skipped_step_leaves_the_next_gradients_alone(crew) -> None:
    """It ends after the next backward, and sends zeros, not what that backward made."""
    one, other = crew(2).run(_own_gradients, 6)
    assert one == [True] * STEPS
    assert other == [step != 6 for step in range(STEPS)]  # inf − inf: not a number


# --- what it equals


def _trained(feature: str, strategy: AnyStrategy) -> tuple[dict[str, torch.Tensor], Any]:
    model, metrics, _ = features.attached(feature, strategy, dist.get_rank(), STEPS)
    return loops.tensors(model), metrics


@pytest.mark.parametrize("feature", ["momentum", "adamw", "batch norm", "clipping"])
def test_with_delta_zero_it_is_local_sgd_that_averages_at_each_step(crew, feature: str) -> None:
    ours = crew(2).run(_trained, feature, SelSync(delta=0.0))
    theirs = crew(2).run(_trained, feature, LocalSGD(period=1))
    for (mine, metrics), (other, expected) in zip(ours, theirs, strict=True):
        assert loops.equal(mine, other)
        for what in ("bytes_sent", "sync_steps", "local_steps", "lssr"):
            assert getattr(metrics, what) == getattr(expected, what)


_GRADIENTS = ["momentum", "adamw", "scaler", "accumulation", "used now and then", "used now and then, zeroed"]


@pytest.mark.parametrize("feature", [*_GRADIENTS, "unused", "batch norm", "tied", "mixed dtypes"])
def test_with_delta_zero_averaging_gradients_is_bsp(crew, feature: str) -> None:
    ours = crew(2).run(_trained, feature, SelSync(delta=0.0, aggregate="gradients"))
    bsp = crew(2).run(_trained, feature, BSP())
    for (mine, metrics), (other, expected) in zip(ours, bsp, strict=True):
        assert loops.equal(mine, other)
        assert (metrics.bytes_sent, metrics.sync_steps) == (expected.bytes_sent, expected.sync_steps)


def _after_the_window(strategy: SelSync, then: AnyStrategy | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank's weights, and those where all average in the window and go on with another strategy, or none."""
    rank, window = dist.get_rank(), strategy.window
    ours, _ = loops.attached(rank, strategy, "momentum", STEPS)
    theirs = loops.mlp(rank)
    optimizer = loops.momentum(theirs)
    data = list(loops.batches(rank, STEPS))
    with offbeat.attach(theirs, optimizer, LocalSGD(period=1), timeout_s=HANG_S):
        loops.train(theirs, optimizer, data[:window])
    with offbeat.attach(theirs, optimizer, then, timeout_s=HANG_S) if then else nullcontext():
        loops.train(theirs, optimizer, data[window:])
        return loops.flat(ours), loops.flat(theirs)


def test_with_delta_infinite_nobody_speaks_after_the_window(crew) -> None:
    strategy = SelSync(delta=math.inf, window=4)
    (ours, expected), (ours_there, expected_there) = crew(2).run(_after_the_window, strategy, None)
    assert torch.equal(ours, expected)
    assert torch.equal(ours_there, expected_there)
    assert not torch.equal(ours, ours_there)


@pytest.mark.parametrize("period", [2, 4, 7])
def test_with_delta_zero_and_a_period_it_is_local_sgd_after_the_window(crew, period: int) -> None:
    """Bit for bit, on the way to the next average as well."""
    strategy = SelSync(delta=0.0, window=3, period=period)
    ranks = crew(2).run(_after_the_window, strategy, LocalSGD(period=period))
    assert all(torch.equal(ours, expected) for ours, expected in ranks)
    assert torch.equal(ranks[0][0], ranks[1][0]) == ((STEPS - 3) % period == 0)


# --- bytes


@pytest.mark.parametrize(("late", "period"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_bytes_of_synchronized_steps_and_of_flags(crew, late: bool, period: int) -> None:
    """After the window a flag of 4 bytes each period, and the weights where somebody's gradient changed."""
    strategy = SelSync(delta=0.05, window=3, late=late, period=period)
    results = crew(2).run(_trained, "momentum", strategy)
    for _, metrics in results:
        assert 3 < metrics.sync_steps < STEPS
        model = ring(weights(loops.mlp()), 2)
        assert metrics.bytes_sent == metrics.sync_steps * model + (STEPS - 3) // period * ring(4, 2)
        assert metrics.lssr == metrics.local_steps / STEPS
