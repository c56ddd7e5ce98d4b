"""Session: what the two worlds call, step by step, on a worker alone; and how late a worker arrives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat import BSP, LocalSGD
from offbeat.core.blocks import Layout
from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending, block_on
from offbeat.core.port import Lane, Op, Port
from offbeat.core.replica import Replica
from offbeat.core.session import Session, arrival_lag, wait_for_all
from offbeat.errors import OffbeatError
from offbeat.strategies.bsp import BSPState
from tests.support.lone_port import NotingPort


def a_session(strategy: BSP | LocalSGD, world: int = 1) -> tuple[Session, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = Replica(model, optimizer=optimizer, layout=strategy.layout(model))
    session = Session(strategy, replica, NotingPort(world=world), Ledger(0, lambda: 0.0))
    session.ledger.start()
    return session, optimizer


def first(session: Session) -> torch.nn.Parameter:
    return next(iter(session.replica.model.parameters()))


def backward(session: Session) -> None:
    block_on(session.backward_begins(first(session)))
    session.replica.model(torch.ones(1, 3)).sum().backward()
    for param in session.replica.model.parameters():
        session.gradient_ready(param)
    for block in session.complete_gradients():
        session.block_ready(block)


def step(session: Session, optimizer: torch.optim.Optimizer) -> None:
    session.add_samples(4)
    backward(session)
    block_on(session.begin_step())
    block_on(session.before_update(optimizer))
    optimizer.step()
    block_on(session.after_update(optimizer))
    optimizer.zero_grad()


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=2)], ids=str)
def test_a_worker_alone_trains_as_without_a_session(strategy: BSP | LocalSGD) -> None:
    session, optimizer = a_session(strategy)
    other, plain = a_session(strategy)
    for _ in range(3):
        step(session, optimizer)
        other.replica.model(torch.ones(1, 3)).sum().backward()
        plain.step()
        plain.zero_grad()
    for one, two in zip(session.replica.model.parameters(), other.replica.model.parameters(), strict=True):
        assert torch.equal(one, two)
    totals = session.ledger.totals()
    assert (totals.steps, totals.samples) == (3, 12)


def test_blocks_are_sent_as_soon_as_their_gradients_are_complete() -> None:
    session, _ = a_session(BSP(), world=2)
    port = session.port
    assert isinstance(port, NotingPort)
    block_on(session.backward_begins(first(session)))
    session.replica.model(torch.ones(1, 3)).sum().backward()
    for param in session.replica.model.parameters():
        session.gradient_ready(param)
    assert len(port.started) == len(session.replica.blocks), "before backward has ended"
    assert session.complete_gradients() == []


def test_a_parameter_that_was_unfrozen_is_found_when_gradients_are_completed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    replica = Replica(model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    session = Session(LocalSGD(), replica, NotingPort(), Ledger(0, lambda: 0.0))
    session.complete_gradients()
    model[0].requires_grad_(True)
    with pytest.raises(OffbeatError, match=r"parameter 0.weight was frozen .* attach again"):
        session.complete_gradients()


def test_a_step_after_it_was_saved_without_its_update_is_refused() -> None:
    session, optimizer = a_session(LocalSGD())
    backward(session)
    block_on(session.begin_step())
    block_on(session.save())
    with pytest.raises(OffbeatError, match=r"save after optimizer.step\(\)"):
        block_on(session.before_update(optimizer))


def test_a_session_continues_from_what_another_has_saved() -> None:
    session, optimizer = a_session(LocalSGD(period=5))
    for _ in range(3):
        step(session, optimizer)
    other, _ = a_session(LocalSGD(period=5))
    assert other.load(block_on(session.save())) == []
    assert other.conductor.state.step == 3


class Staggered(NotingPort):
    """A port of several workers: the one that came first has waited for 5 seconds."""

    def all_reduce(
        self, tensor: torch.Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT
    ) -> Pending[torch.Tensor]:
        assert op is Op.MAX
        return Arrived(torch.maximum(tensor, torch.tensor([5.0 if tensor.any() else 0.0])))


@pytest.mark.parametrize(("arrived_s", "lag_s"), [(95.0, 0.0), (97.0, 2.0), (99.5, 4.5)])
def test_the_lag_is_counted_from_the_first_arrival(arrived_s: float, lag_s: float) -> None:
    port, device = Staggered(world=2), torch.device("cpu")
    block_on(wait_for_all(port, device))
    assert block_on(arrival_lag(port, device, lambda: 100.0, arrived_s)) == pytest.approx(lag_s)


@pytest.mark.parametrize("averages", [False, True])
def test_a_skipped_step_that_may_average_ends_after_the_next_backward(averages: bool) -> None:
    """A strategy that sends blocks ends a skipped step before them, unless that may replace the weights."""

    class Averaging(BSP):
        def layout(self, model: nn.Module) -> Layout:
            return Layout.default(model, gradients=True)

        async def step(self, state: BSPState, replica: Replica, port: Port) -> None:
            await state.gradients.finish(port)
            ended.append(await replica.update(averages=averages))

    ended: list[bool] = []
    session, _ = a_session(Averaging())
    backward(session)
    block_on(session.begin_step())
    session.replica.model.zero_grad()
    block_on(session.backward_begins(first(session)))
    assert ended == ([] if averages else [False])
    for block in session.complete_gradients():
        session.block_ready(block)
    block_on(session.begin_step())
    assert ended == [False]
    assert session.replica.inputs.skipped_updates == 1
