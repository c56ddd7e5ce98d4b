"""Evaluations beside training: worker 0 looks at a step when the last worker has come to it; nobody waits.

tests/conformance/test_looking.py shows, for every strategy, that a run is the same however often it is
evaluated.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offbeat import ASP, LocalSGD
from offbeat.core.ledger import WorkerTotals
from offbeat.worlds.virtual.session import VirtualSession, autograd
from offbeat.worlds.virtual.simulation import run_workers
from tests.support.loops import flat
from tests.support.virtual_runs import close, cluster_of
from tests.worlds.virtual.test_session import STEPS, build, loss, samples, train

pytestmark = pytest.mark.virtual


def test_worker_0_sees_the_mean_of_a_step_and_nobody_waits_for_that() -> None:
    """Worker 1 comes at the end of its last step; worker 0 has made another one by then."""
    seen: list[Tensor] = []

    async def look(session: VirtualSession) -> tuple[Tensor, Tensor, float]:
        await train(session)
        before, at_s = flat(session.model), session.seconds
        await session.look(lambda totals: seen.append(flat(session.model)))
        assert session.seconds == at_s and not seen
        await session.backward(next(samples(session.rank)), samples=4)
        await session.update()
        return before, flat(session.model), session.seconds

    cluster = cluster_of(0.1, 0.15)
    first, second = run_workers(2, cluster, LocalSGD(period=100), build, autograd(loss), look)
    assert first is not None and second is not None
    assert torch.allclose(seen[0], (first[0] + second[0]) / 2)
    assert not torch.equal(first[0], first[1]) and first[2] == close((STEPS + 1) * 0.1)


def test_the_totals_of_a_look_are_those_of_its_step() -> None:
    """Worker 0 has done two steps more when worker 1 comes, which takes three times as long."""
    seen: list[list[WorkerTotals]] = []

    async def look(session: VirtualSession) -> None:
        for step in range(3):
            await session.backward(next(samples(session.rank)), samples=4)
            await session.update()
            if step == 0:
                await session.look(seen.append)

    run_workers(2, cluster_of(0.1, 0.3), LocalSGD(period=100), build, autograd(loss), look)
    assert [totals.steps for totals in seen[0]] == [1, 1]
    assert [totals.seconds for totals in seen[0]] == [close(0.1), close(0.3)]


def test_an_error_of_a_look_ends_the_run_and_the_worker_has_its_own_weights_back() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    async def fail(session: VirtualSession) -> None:
        await train(session)
        own = flat(session.model)

        def look(totals: list[WorkerTotals]) -> None:
            raise RuntimeError("no such metric")

        try:
            await session.look(look, alone=True)
        finally:
            kept.append((own, flat(session.model)))

    with pytest.raises(RuntimeError, match="no such metric"):
        run_workers(1, cluster_of(0.1), ASP(overlap=False), build, autograd(loss), fail)
    assert torch.equal(*kept[0])
