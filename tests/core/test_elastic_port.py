"""The port of a roster, of either world: what cannot be redone is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat.core.elastic_port import RosterPort
from offbeat.core.ledger import Ledger
from offbeat.core.membership import Roster
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
    with pytest.raises(OffbeatError, match="only from worker 0"):
        port.broadcast(torch.ones(2), root=1)
    with pytest.raises(OffbeatError, match="no parameter server"):
        _ = port.server
