"""Oscars by itself: how a worker times its steps, when it pushes, what it reports, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import Oscars, SettingError
from offbeat.core.conductor import Conductor
from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending, block_on
from offbeat.core.port import PullResult, Usage
from offbeat.core.replica import Replica
from offbeat.strategies.oscars import UNTIMED
from tests.support.lone_port import NotingPort


class Planning:
    """A server that adds updates to its weights, and plans rounds of a given length."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.reports: list[tuple[float, ...]] = []
        self.pushed: list[Tensor] = []

    def push(
        self, update: list[Tensor], clock: int, *, report: Sequence[float] = (), codec: int = 0
    ) -> Pending[bool]:
        assert clock == len(self.pushed) + 1
        self.reports.append(tuple(report))
        self.pushed.append(update[0].clone())
        return Arrived(True)

    def pull(self, into: list[Tensor], clock: int | None) -> Pending[PullResult]:
        return Arrived(PullResult(0, hint=self.steps))


class TimedPort(NotingPort):
    """A port whose clock the test sets."""

    compute_s = 0.0

    def usage(self) -> Usage:
        return Usage(self.compute_s, 0.0, 0)


def trained(strategy: Oscars, step_s: list[float], planned: int = 3) -> tuple[Planning, list[float]]:
    """Train with steps that take so long, of gradient 1; return the server, and the plans in the ledger."""
    server = Planning(planned)
    port = TimedPort(server=server)  # type: ignore[arg-type]
    model = nn.ParameterList([nn.Parameter(torch.zeros(16))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = Replica(model, optimizer=optimizer)
    conductor: Conductor[Any] = Conductor(strategy, replica, port, Ledger(0, lambda: 0.0))
    plans = []
    for seconds in step_s:
        port.compute_s += seconds
        model[0].grad = torch.ones(16)
        block_on(conductor.begin())
        optimizer.step()
        block_on(conductor.update())
        plans.append(port.ledger.gauges["planned_steps"])
    return server, plans


def test_the_first_round_is_one_step_and_the_next_as_the_server_plans() -> None:
    server, plans = trained(Oscars(), [1.0] * 8)
    assert [report[1] for report in server.reports] == [1, 3, 3]
    assert plans == [3] * 8
    changes = [update[0].item() for update in server.pushed]
    assert changes == [-1.0, -3.0, -3.0], "the local change since the last pull"


def test_updates_are_normalised_by_their_local_steps() -> None:
    server, _ = trained(Oscars(normalise=True), [1.0] * 7)
    for update in server.pushed:
        torch.testing.assert_close(update, torch.full((16,), -1.0))


def test_the_first_steps_are_not_timed_and_later_ones_are_smoothed() -> None:
    assert UNTIMED == 2
    server, _ = trained(Oscars(belief=0.25, patience=10.0), [50.0, 50.0, 2.0, 2.0, 4.0, 4.0, 4.0])
    assert [report[2] for report in server.reports] == [0.0, 2.0, 2.0 + 0.25 * (4.0 - 2.0)]


def test_a_worker_that_has_become_slow_pushes_before_it_has_done_all_planned_steps() -> None:
    """Planned: 4 steps of 1 s, at most 5 s with patience and slack: a second step of 4 s would end at 8 s.

    Then a step is believed to take 1.9 s, and 4 of them up to 9.5 s: a second one still fits.
    """
    server, _ = trained(Oscars(patience=0.2), [1.0] * 5 + [4.0] * 2, planned=4)
    assert [report[1] for report in server.reports] == [1, 4, 1]


def test_the_servers_half_has_the_same_settings() -> None:
    strategy = Oscars(tau=7, schedule="lengthen", busy=0.5, limit=2.0, weighted=False)
    settings = strategy.server_half().rule.settings  # type: ignore[attr-defined]
    for name in (
        "tau",
        "schedule",
        "busy",
        "limit",
        "quantile",
        "patience",
        "lateness",
        "weighted",
        "normalise",
    ):
        assert getattr(settings, name) == getattr(strategy, name), name


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"tau": 0}, "tau=0: a whole number, at least 1"),
        ({"schedule": "grow"}, "schedule='grow': choose one of"),
        ({"busy": 1.0}, "busy=1.0: a number, the fraction of a round, from 0 to below 1"),
        ({"limit": 0.0}, "limit=0.0"),
        ({"quantile": 1.5}, "quantile=1.5"),
        ({"patience": -0.1}, "patience=-0.1"),
        ({"lateness": -1}, "lateness=-1"),
        ({"belief": 0}, "belief=0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Oscars(**bad)
