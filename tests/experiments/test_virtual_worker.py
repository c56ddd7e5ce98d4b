"""A virtual worker, as the loop sees it: worker 0 knows the totals of all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.core.ledger import Ledger
from offbeat.core.pending import block_on
from offbeat.experiments.virtual_worker import VirtualWorker

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize(("rank", "known"), [(0, [0, 1]), (1, [1])])
def test_worker_0_has_the_totals_of_all(rank: int, known: list[int]) -> None:
    ledgers = [Ledger(number, lambda: 0.0) for number in range(2)]
    session: Any = SimpleNamespace(rank=rank, model=None, port=None, ledger=ledgers[rank], seconds=7.0)
    worker = VirtualWorker(session, ledgers)
    assert [totals.rank for totals in block_on(worker.worker_totals(alone=False))] == known
    assert worker.seconds == 7.0
