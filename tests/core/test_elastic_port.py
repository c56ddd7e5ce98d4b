"""The port of a roster, of either world: what cannot be redone is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.core.elastic_port import RosterOperation, RosterPort
from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane, Signature
from offbeat.core.roster import Roster
from offbeat.core.slices import Slices
from offbeat.errors import OffbeatError


class NoPort(RosterPort):
    """A port that starts nothing."""

    async def _connect(self, roster: Roster) -> bool:
        return True

    def _operation(self, *description: Any) -> Any:
        raise AssertionError("was to be refused")

    async def hand_over(self, roster: Roster, makers: Any) -> None:
        return None

    def give_up(self, reason: str) -> None: ...


def test_operations_that_cannot_be_redone_are_refused() -> None:
    member: Any = None
    port = NoPort(member, Ledger(0, lambda: 0.0))
    port.world = 2
    with pytest.raises(OffbeatError, match="reduce_scatter cannot be redone"):
        port.reduce_scatter([torch.ones(2), torch.ones(2)])
    with pytest.raises(OffbeatError, match="all_to_all cannot be redone"):
        port.all_to_all([torch.ones(2)] * 2, [torch.ones(2)] * 2)
    with pytest.raises(OffbeatError, match="differ in size"):
        port.all_gather([torch.ones(2), torch.ones(3)])
    with pytest.raises(OffbeatError, match="of one tensor"):
        port.all_gather(Slices((2, 2), torch.ones(4)))
    with pytest.raises(OffbeatError, match="only from worker 0"):
        port.broadcast(torch.ones(2), root=1)
    with pytest.raises(OffbeatError, match="no parameter server"):
        _ = port.server


class Unsent(RosterOperation[Any]):
    """An operation that sends nothing."""

    def wait(self) -> None: ...

    def _launch(self) -> None: ...

    async def ended(self) -> bool:
        return True

    def _deliver(self) -> None: ...


@pytest.mark.parametrize("launched", [False, True], ids=["started", "launched"])
def test_packets_have_the_places_of_the_roster_in_which_they_are_sent(launched: bool) -> None:
    """Worker b dies after c has started an operation, be it before or after it was launched."""
    member: Any = SimpleNamespace(roster=Roster(1, ("a", "b", "c")))
    port = NoPort(member, Ledger(0, lambda: 0.0))
    port.rank, port.world = 2, 3
    packets = [torch.full((4,), float(rank)) for rank in range(3)]
    own = packets[2]
    operation = Unsent(port, Signature("all_gather", "slices", (16,) * 3), packets, packets, Lane.FRONT)
    if launched:
        operation.launch()
        assert len(packets) == 3 and packets[2] is own
    member.roster = Roster(2, ("a", "c"))
    port.rank, port.world = 1, 2
    operation.launch()
    assert len(packets) == 2 and torch.equal(packets[1], own)
    assert packets[1] is not own, "the operation of the old roster may still write into that"
