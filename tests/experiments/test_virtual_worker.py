"""A virtual worker, as the loop sees it: the last look is waited for, and others are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.core.pending import block_on
from offbeat.experiments.virtual_worker import VirtualWorker

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize(("alone", "last"), [(False, False), (True, False), (False, True)])
def test_only_the_last_look_is_waited_for(alone: bool, last: bool) -> None:
    asked: list[dict[str, bool]] = []

    async def look(shown: Any, **options: bool) -> None:
        asked.append(options)

    session: Any = SimpleNamespace(rank=1, model=None, optimizers=[], port=None, seconds=7.0, look=look)
    worker = VirtualWorker(session)
    block_on(worker.look(lambda totals: None, alone, last))
    assert asked == [{"alone": alone, "wait": last}]
    assert worker.seconds == 7.0
