"""An exchange with a server takes time from its worker, and that is what is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbeat.core.blocks import trainable_bytes
from offbeat.errors import OffbeatError
from offbeat.experiments import server_time
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.server_time import time_exchange
from offbeat.experiments.tasks import task
from offbeat.strategies.push_pull import PushPull
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.lost import patched

pytestmark = pytest.mark.processes

LONGER_S = 0.02


def _timed(alone_s: float, patch: pytest.MonkeyPatch) -> float:
    """Time an exchange whose pushes take the worker LONGER_S to make; return the seconds of one."""
    send = PushPull._send

    def slowly(*args: Any) -> Any:
        time.sleep(LONGER_S)
        return send(*args)

    patch.setattr(PushPull, "_send", slowly)
    chosen = task("digits")
    torch.manual_seed(0)
    model = chosen.build()
    options = RunOptions(timeout_s=HANG_S)
    where = dist.get_rank(), dist.get_world_size()
    found = time_exchange(chosen, chosen.load(), model, *where, options, alone_s)
    return 2 * found * 2 * trainable_bytes(model)  # at both ends, both ways


def test_what_a_worker_does_for_an_exchange_is_counted(crew: Callable[[int], Crew]) -> None:
    assert min(crew(2).run(patched, _timed, 0.0)) > LONGER_S


def test_steps_without_an_exchange_do_not_count(crew: Callable[[int], Crew]) -> None:
    assert crew(2).run(patched, _timed, math.inf) == [0.0, 0.0]


def _refused(patch: pytest.MonkeyPatch) -> float:
    def refuse(*args: Any, **settings: Any) -> Any:
        raise OffbeatError("nobody can be reached")

    patch.setattr(server_time, "attach", refuse)
    chosen = task("digits")
    return time_exchange(chosen, chosen.load(), chosen.build(), 0, 2, RunOptions(), 0.0)


def test_a_server_that_cannot_be_reached_costs_nothing_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _refused(monkeypatch) == 0.0
    assert "was not timed, and costs nothing: nobody can be reached" in caplog.text


def test_gradients_that_were_there_before_do_not_count() -> None:
    chosen = task("digits")
    torch.manual_seed(0)
    model, data = chosen.build(), chosen.load()
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e30)
    for _ in server_time._steps(chosen, data, model, iter([torch.arange(4)] * 40)):
        assert all(param.grad is not None and param.grad.abs().max() < 1e3 for param in model.parameters())
        model.zero_grad()
