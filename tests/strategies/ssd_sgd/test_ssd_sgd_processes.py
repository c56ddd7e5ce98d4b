"""SSD-SGD over processes: stopped anywhere, skipped anywhere, and its own gradients alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import SSDSGD
from tests.support import loops
from tests.support.limits import HANG_S
from tests.support.resumed import resumed_run, straight_run

pytestmark = pytest.mark.processes

RATE = 0.5


@pytest.mark.parametrize(
    ("warmup", "delay", "staggered", "optimizer", "rule"),
    [
        (2, 1, False, "adamw", "carried"),
        (0, 3, False, "momentum", "carried"),
        (0, 3, True, "momentum", "carried"),
        (2, 4, True, "adamw", "carried"),
        (2, 3, True, "momentum", "authors"),
    ],
)
def test_stopped_with_anything_in_flight_and_resumed(
    crew, warmup: int, delay: int, staggered: bool, optimizer: str, rule: str
) -> None:
    """Before, at and after the end of the warm-up; with a push, with a pull, with both."""
    strategy = SSDSGD(rule=rule, warmup=warmup, delay=delay, staggered=staggered)
    straight = crew(2).run(straight_run, strategy, optimizer)
    for stop in (1, 2, 3, 5, 6):
        stopped = crew(2).run(resumed_run, strategy, optimizer, stop)
        for one, other in zip(straight, stopped, strict=True):
            assert loops.equal(one, other), stop


class Line(nn.Module):
    """Its gradient is what it is asked to be."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, dtype=torch.float64))


def _asked(
    strategy: SSDSGD, steps: int, clip: float | None, skip: dict[int, int]
) -> tuple[list[Tensor], Any]:
    """Gradient r + 1 on rank r. `skip`: in which step which rank's optimizer does not step."""
    rank = dist.get_rank()
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5, weight_decay=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    looks = []
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        for step in range(steps):
            optimizer.zero_grad()
            (model.w.sum() * (rank + 1)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if skip.get(step) != rank:
                optimizer.step()
            scheduler.step()
        sync.settle()
        for _ in range(2):
            with sync.consensus():
                looks.append(model.w.detach().clone())
        return looks, sync.metrics


def _expected(steps: int, grads: list[list[float]]) -> float:
    """Momentum SGD, with the mean gradient of each step and its own learning rate."""
    w = buffer = 0.0
    for step in range(steps):
        mean = sum(grads[step]) / len(grads[step])
        buffer = 0.5 * buffer + mean + 0.25 * w
        w -= RATE * 0.5**step * buffer
    return w


@pytest.mark.parametrize("skip", [{}, {4: 1}, {3: 0, 6: 1}], ids=str)
def test_who_skips_a_step_has_a_gradient_of_zero_in_it(crew, skip: dict[int, int]) -> None:
    steps = 7  # the last step too is finished by settle()
    results = crew(2).run(_asked, SSDSGD(warmup=2, delay=2), steps, None, skip)
    grads = [[0.0 if skip.get(step) == rank else rank + 1.0 for rank in range(2)] for step in range(steps)]
    for looks, metrics in results:
        for look in looks:
            torch.testing.assert_close(look, torch.full_like(look, _expected(steps, grads)))
        assert metrics.steps == steps


def test_gradients_are_clipped_by_each_worker_then_averaged(crew) -> None:
    """Norms are 8 and 16: clipped to 12, the second counts for 1.5. In the warm-up, their mean's is: 12."""
    for looks, _ in crew(2).run(_asked, SSDSGD(warmup=2, delay=2), 6, 12.0, {}):
        grads = [[1.5, 1.5]] * 2 + [[1.0, 1.5]] * 4
        torch.testing.assert_close(
            looks[0], torch.full_like(looks[0], _expected(6, grads)), rtol=1e-6, atol=0
        )


def _fused(strategy: SSDSGD) -> None:
    model = loops.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S):
        loops.train(model, optimizer, loops.batches(0, 3), scaler=torch.amp.GradScaler("cpu"))


def test_gradients_that_only_a_fused_optimizer_would_unscale_are_refused(crew) -> None:
    crew(1).start(_fused, SSDSGD(warmup=1))
    ((fine, (name, message, _)),) = crew(1).outcomes()
    assert not fine
    assert name == "OffbeatError"
    assert "fused=False" in message
