"""OSP and what the loop does to gradients: clipping, overflow, schedules, batch norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import OSP
from tests.conformance.features import batch_norm
from tests.support import loops
from tests.support.limits import HANG_S
from tests.support.osp_linear import LATE, STEPS, Linear, coefficients, played


def _clipped(norm: float) -> tuple[list[Tensor], list[list[int]]]:
    lates = []
    with played(LATE) as play:
        for step in coefficients(play.rank):
            lates.append(play.late)
            play.backward(step)
            nn.utils.clip_grad_norm_(play.model.parameters(), norm)
            play.optimizer.step()
        return play.agreed(), lates


@pytest.mark.parametrize("norm", [30.0, 1e6], ids=["clipped", "never reached"])
def test_clipping_by_norm_reaches_what_is_late_too(crew, norm: float) -> None:
    """The factor is that of the important part, the mean of which all workers clip alike."""
    (one, lates), (other, _) = crew(2).run(_clipped, norm)
    assert all(map(torch.equal, one, other))
    weights = [w.detach().double() for w in Linear().parts]
    for late, mine, theirs in zip(lates, coefficients(0), coefficients(1), strict=True):
        means = [(a.double() + b) / 2 for a, b in zip(mine, theirs, strict=True)]  # type: ignore[union-attr, operator]
        important = torch.cat([means[k] for k in range(6) if k not in late]).norm().item()
        factor = min(1.0, norm / (important + 1e-6))
        weights = [w - 0.5 * factor * mean for w, mean in zip(weights, means, strict=True)]
    for found, expected in zip(one, weights, strict=True):
        if norm == 1e6:
            assert torch.equal(found, expected.float()), "a factor of exactly 1"
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4)


def _one_layer(play: Any) -> None:
    play.model.parts[0].grad = None if play.model.parts[0].grad is None else play.model.parts[0].grad / 2


def _by_value(play: Any) -> None:
    nn.utils.clip_grad_value_(play.model.parameters(), 1.0)


def _cleared(play: Any) -> None:
    play.model.parts[1].grad = None


def _alike(play: Any) -> None:
    for param in play.model.parameters():
        param.grad = None if param.grad is None else param.grad * 0.3


def _changed(change: Callable[[Any], None]) -> str:
    try:
        with played(LATE) as play:
            for step in coefficients(play.rank):
                play.backward(step)
                change(play)
                play.optimizer.step()
    except offbeat.OffbeatError as told:
        return str(told)
    return ""


@pytest.mark.parametrize("change", [_one_layer, _by_value, _cleared, _alike])
def test_what_no_factor_describes_is_refused(crew, change: Callable[[Any], None]) -> None:
    """Before anything is late, too: the loop does the same later, to gradients that it does not see."""
    for told in crew(2).run(_changed, change):
        assert ("osp sends some gradients late" in told) == (change is not _alike)


BAD = 8


def _overflowing(optimizer: str, where: str) -> tuple[list[Tensor], float, list[bool], list[list[int]]]:
    """In one step one gradient of rank 1 is not finite; a late one, or an important one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    finite, lates = [], []
    with played(LATE, optimizer) as play:
        for t, step in enumerate(coefficients(play.rank)):
            late = play.late
            lates.append(late)
            if t == BAD and play.rank == 1:
                k = late[0] if where == "late" else next(k for k in range(6) if k not in late)
                spoilt = step[k]
                assert spoilt is not None
                spoilt[3] = torch.inf
            play.backward(step, scaler.scale)
            scaler.step(play.optimizer)
            scaler.update()
            finite.append(all(w.isfinite().all().item() for w in play.weights()))
        return play.agreed(), scaler.get_scale(), finite, lates


@pytest.mark.parametrize("where", ["late", "important"])
@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(crew, optimizer: str, where: str) -> None:
    (one, scale, finite, lates), (other, scale_there, finite_there, _) = crew(2).run(
        _overflowing, optimizer, where
    )
    assert lates[BAD]
    assert scale == scale_there == 32.0
    assert all(finite + finite_there)
    assert all(map(torch.equal, one, other))
    data = [coefficients(rank) for rank in (0, 1)]
    steps = [t for t in range(STEPS) if t != BAD]
    for k, start in enumerate(Linear().parts):
        expected = start.detach() - 0.5 * sum((data[0][t][k] + data[1][t][k]) / 2 for t in steps)  # type: ignore[operator]
        assert torch.equal(one[k], expected), "all other steps count, unscaled"


# --- real gradients


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "rates": lambda each: torch.optim.lr_scheduler.StepLR(each, 3, 0.5),
    "momentum": lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=STEPS + 1),
}


def _same_data(optimizer: str, schedule: str) -> tuple[Tensor, Tensor, int]:
    """All ranks see the same batches: the plain loop, ours, and in how many steps something was late."""
    lates = []

    def train(model: nn.Module, opt: Any, look: Callable[[], None]) -> None:
        opts = opt if isinstance(opt, list) else [opt]
        schedulers = [SCHEDULES[schedule](each) for each in opts] if schedule else []

        def after_step(_: int) -> None:
            look()
            for scheduler in schedulers:
                scheduler.step()

        loops.train(model, opt, loops.batches(0, STEPS), after_step=after_step)

    plain, ours = loops.mlp(), loops.mlp()
    train(plain, loops.OPTIMIZERS[optimizer](plain), lambda: None)
    opt = loops.OPTIMIZERS[optimizer](ours)
    with offbeat.attach(ours, opt, LATE, timeout_s=HANG_S) as sync:
        train(ours, opt, lambda: lates.append(len(sync._session.conductor.state.late)))
        sync.settle()
        with sync.consensus():
            return loops.flat(plain), loops.flat(ours), sum(map(bool, lates))


CASES = [(optimizer, schedule) for optimizer in loops.OPTIMIZERS for schedule in ("", "rates")]


@pytest.mark.parametrize(("optimizer", "schedule"), [*CASES, ("momentum", "momentum"), ("adamw", "momentum")])
def test_the_same_data_everywhere_is_the_plain_loop(crew, optimizer: str, schedule: str) -> None:
    """Then the local gradient is the mean (on two ranks to the bit), and a prediction is the step itself."""
    for plain, ours, splits in crew(2).run(_same_data, optimizer, schedule):
        assert splits > STEPS - 4
        assert torch.equal(plain, ours)


def _closed(optimizer: str) -> tuple[Any, Any]:
    plain, ours = loops.mlp(), loops.mlp()
    opts = [loops.OPTIMIZERS[optimizer](model) for model in (plain, ours)]
    loops.train(plain, opts[0], loops.batches(0, STEPS))
    with offbeat.attach(ours, opts[1], LATE, timeout_s=HANG_S):
        loops.train(ours, opts[1], loops.batches(0, STEPS))
    return opts[0].state_dict()["state"], opts[1].state_dict()["state"]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_after_close_the_optimizers_state_has_the_last_step_too(crew, optimizer: str) -> None:
    for plain, ours in crew(2).run(_closed, optimizer):
        torch.testing.assert_close(ours, plain)


def _watched() -> tuple[list[set[str]], list[int]]:
    rank = dist.get_rank()
    model = batch_norm(rank)
    opt = loops.momentum(model)
    late: list[set[str]] = []
    memory: list[int] = []
    strategy = OSP(budget=1.0, growth=0, importance="random")  # by chance everything would be late some time
    with offbeat.attach(model, opt, strategy, timeout_s=HANG_S) as sync:

        def look(_: int) -> None:
            state, blocks = sync._session.conductor.state, sync._session.replica.blocks
            late.append({name for i in state.late for name in blocks[i].names})
            memory.append(hash(tuple(t.data_ptr() for t in [*state.deferred.weights, *state.deferred.grads])))

        loops.train(model, opt, loops.batches(rank, STEPS), after_step=look)
    return late, memory


def test_batch_norm_is_never_late_and_memory_is_taken_once(crew) -> None:
    for late, memory in crew(2).run(_watched):
        assert all(names == {"0.weight", "0.bias", "3.weight", "3.bias"} for names in late)
        assert len(set(memory)) == 1
