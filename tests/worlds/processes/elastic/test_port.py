"""The elastic port over processes: memory is used again. Results are in test_session.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.core.pending import block_on
from offbeat.core.port import Lane, Op, Signature
from offbeat.core.roster import Roster
from offbeat.worlds.processes.elastic.port import ElasticPort
from offbeat.worlds.processes.ledger import SharedLedger
from tests.support.membership import Stage


class NoGroups:
    """The groups of a roster of one."""

    async def connect(self, roster: Roster) -> bool:
        return True

    def is_open(self, lane: Any) -> bool:
        return True

    def of(self, lane: Any) -> None:
        return None


@pytest.fixture
def port() -> ElasticPort:
    stage = Stage(rounds=1, founders=1, minimum=1)
    stage.add_worker()
    (worker,) = stage.workers
    worker.close()
    parts: Any = (worker.member, NoGroups(), None, None, SharedLedger(0, time.monotonic))
    port = ElasticPort(*parts, 60.0, lambda finished: None)

    async def nothing(roster: Roster) -> bool:
        return True

    block_on(port.lanes.join(nothing))
    return port


def test_world_of_one_commits_its_operations(port: ElasticPort) -> None:
    """Newcomers are named in a commit, so there must be one."""
    tensor = torch.ones(3)
    pending = port.all_reduce(tensor, Op.MEAN)
    assert not pending.done()
    pending.wait()
    assert pending.done()
    assert pending.result() is tensor
    assert port.member._batches["front"] == 1


def test_memory_of_copies_is_used_again(port: ElasticPort) -> None:
    like = torch.ones(5, dtype=torch.float64)
    one, other = port.take_copy(like), port.take_copy(like)
    assert one.data_ptr() != other.data_ptr()
    port.give_back(one)
    assert port.take_copy(like).data_ptr() == one.data_ptr()
    assert port.take_copy(like.float()).dtype == torch.float32


def test_worker_whose_exchange_fails_lets_go_of_the_others_at_once(port: ElasticPort) -> None:
    """They may wait for it in their own exchanges, until their next look."""
    done: list[str] = []
    groups: Any = SimpleNamespace(wait=lambda work: False, disconnect=lambda: done.append("disconnected"))
    port.groups = groups
    operation: Any = port._operation(Signature("all_reduce", "mean", (4,)), [torch.ones(1)], None, Lane.FRONT)
    operation._work = object()
    assert not block_on(operation.ended())
    assert done == ["disconnected"]
