"""Conductor: leads a step through its moments, finishes a skipped one, and undoes a publication."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from offbeat import Strategy
from offbeat.core.blocks import Block
from offbeat.core.conductor import Conductor
from offbeat.core.ledger import Ledger
from offbeat.core.pending import block_on
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError
from tests.support.lone_port import NotingPort


@dataclass
class Diary:
    """What happened, in order."""

    events: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Narrating(Strategy[Diary]):
    name = "narrating"
    summary = "writes down its moments, and publishes weights of 7"

    looks_before: bool = True

    def init(self, replica: Replica) -> Diary:
        assert not torch.is_grad_enabled()
        return Diary()

    def ready(self, state: Diary, replica: Replica, block: Block, port: Port) -> None:
        assert not torch.is_grad_enabled()
        state.events.append(f"block {block.index}")

    async def step(self, state: Diary, replica: Replica, port: Port) -> None:
        assert not torch.is_grad_enabled()
        state.events.append("begin")
        if self.looks_before:
            state.events.append(f"before {await replica.about_to_update()}")
        state.events.append(f"after {await replica.update()}")

    async def drain(self, state: Diary, replica: Replica, port: Port) -> None:
        state.events.append("drain")

    async def publish(self, state: Diary, replica: Replica, port: Port) -> list[Tensor]:
        return [torch.full_like(flat, 7.0) for flat in replica.weights]


def conducted(looks_before: bool = True, world: int = 1) -> tuple[Conductor[Diary], list[str]]:
    model = nn.Linear(3, 2)
    replica = Replica(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    port = NotingPort(world=world)
    conductor = Conductor(Narrating(looks_before=looks_before), replica, port, Ledger(0, lambda: 0.0))
    conductor.ledger.start()
    return conductor, conductor.state.events


def test_a_step_goes_through_its_moments_and_counts_when_it_ends() -> None:
    conductor, events = conducted()
    conductor.ready(conductor.replica.blocks[0])
    block_on(conductor.begin())
    assert events == ["block 0", "begin"]
    block_on(conductor.about_to_update())
    assert events[2:] == ["before True"]
    assert conductor.ledger.totals().steps == 0
    block_on(conductor.update())
    assert events[3:] == ["after True"]
    assert conductor.ledger.totals().steps == 1
    assert torch.is_grad_enabled()


def test_a_moment_that_a_step_does_not_await_passes_it_by() -> None:
    conductor, events = conducted(looks_before=False)
    block_on(conductor.begin())
    block_on(conductor.about_to_update())
    assert events == ["begin"]
    block_on(conductor.update())
    assert events == ["begin", "after True"]


@pytest.mark.parametrize("looked", [False, True])
def test_a_step_whose_optimizer_never_ran_is_finished_before_the_next_begins(looked: bool) -> None:
    conductor, events = conducted()
    block_on(conductor.begin())
    if looked:
        block_on(conductor.about_to_update())
    block_on(conductor.begin())
    assert events == ["begin", f"before {looked}", "after False", "begin"]
    assert conductor.ledger.totals().steps == 1


def test_to_drain_finishes_the_step_first() -> None:
    conductor, events = conducted()
    block_on(conductor.begin())
    block_on(conductor.drain())
    assert events == ["begin", "before False", "after False", "drain"]
    block_on(conductor.drain())
    assert events[4:] == ["drain"]


def test_an_aborted_step_is_remembered_until_the_next_begins() -> None:
    conductor, events = conducted()
    block_on(conductor.abort_step())
    assert not conductor.step_aborted, "there was no step"
    block_on(conductor.begin())
    block_on(conductor.abort_step())
    assert conductor.step_aborted
    assert events == ["begin", "before False", "after False"]
    block_on(conductor.begin())
    assert not conductor.step_aborted


def test_a_backward_inside_of_the_optimizers_step_is_refused() -> None:
    conductor, _ = conducted()
    block_on(conductor.begin())
    with pytest.raises(OffbeatError, match=r"narrating looks at the gradients just before .*inside backward"):
        block_on(conductor.update())


def test_publishing_waits_for_nothing_in_flight_and_can_be_undone() -> None:
    conductor, events = conducted(world=2)
    own = [flat.clone() for flat in conductor.replica.weights]
    published = block_on(conductor.publish(conductor.port))
    assert events == []
    assert all(map(torch.equal, conductor.replica.weights, own))
    restore = published.show(conductor.replica)
    assert all((flat == 7.0).all() for flat in conductor.replica.weights)
    restore()
    assert all(map(torch.equal, conductor.replica.weights, own))


def test_a_barrier_is_one_operation_of_all_workers() -> None:
    conductor, _ = conducted(world=2)
    block_on(conductor.barrier())
    port = conductor.port
    assert isinstance(port, NotingPort)
    assert [signature.operation for signature, _ in port.started] == ["all_reduce"]
