"""GSSP over real processes: BSP where it must be, groups that do not wait for each other, sparse pushes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import BSP, GSSP, GDTopK
from offbeat.core.ledger import Ledger
from tests.conformance.hand_counts import weights
from tests.conformance.table import AnyStrategy
from tests.support import loops
from tests.support.beside import lightly
from tests.support.crew import Crew
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

Hire = Callable[[int], Crew]
STEPS = 12


def _trained(strategy: AnyStrategy) -> Tensor:
    return loops.flat(loops.attached(dist.get_rank(), strategy, "momentum", STEPS)[0])


def test_one_group_without_staleness_is_bsp(crew: Hire) -> None:
    """With servers that are processes."""
    bsp = crew(2).run(_trained, BSP())
    for ours in crew(2).run(_trained, GSSP(groups="0,1", staleness=0)):
        torch.testing.assert_close(ours, bsp[0], rtol=0, atol=1e-5)


class Drift(torch.optim.Optimizer):
    """Every step adds 1 to every weight."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(1.0)


class Drifting:
    """A model whose weights start at 0 and count the steps of all workers."""

    def __init__(self, strategy: AnyStrategy) -> None:
        self.model = nn.Linear(40, 5, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = Drift(self.model.parameters(), {})
        self.sync = offbeat.attach(self.model, self.optimizer, strategy, timeout_s=HANG_S)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(torch.ones(2, 40)).sum().backward()
            self.optimizer.step()

    def agreed(self) -> tuple[float, float]:
        """The least and the largest of all weights that an evaluation sees."""
        self.sync.settle()
        with self.sync.consensus():
            low, high = self.model.weight.aminmax()
            return low.item(), high.item()


def _apart(strategy: AnyStrategy) -> tuple[tuple[float, float], Any]:
    """Rank 1 does its first step when rank 0, which waits for nobody, has done its last."""
    rank = dist.get_rank()
    ours = Drifting(strategy)
    if rank == 0:
        ours.steps(20)
    dist.barrier()
    if rank == 1:
        ours.steps(8)
    seen, metrics = ours.agreed(), ours.sync.metrics
    ours.sync.close()
    return seen, metrics


@pytest.mark.parametrize("staleness", [0, 3])
def test_groups_wait_for_their_own_only_and_tell_each_other_all(crew: Hire, staleness: int) -> None:
    for seen, metrics in crew(2).run(lightly, _apart, GSSP(groups="0/1", staleness=staleness)):
        assert seen == (14.0, 14.0), "every step of all workers, by halves"
        assert metrics.staleness_max <= staleness


def _measured() -> tuple[list[int], tuple[float, float]]:
    """Rank 1 is said to compute four times as long: the speed that each rank is told of, step by step."""
    rank = dist.get_rank()
    step_s = 0.4 if rank == 1 else 0.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "compute_s", property(lambda ledger: ledger.steps * step_s))
        ours = Drifting(GSSP(window=3, staleness=1))
        speeds = []
        for _ in range(10):
            ours.steps(1)
            speeds.append(ours.sync._session.conductor.state.hint)
        seen = ours.agreed()
        ours.sync.close()
    return speeds, seen


def test_workers_are_grouped_by_the_times_that_come_with_their_pushes(crew: Hire) -> None:
    for rank, (speeds, seen) in enumerate(crew(2).run(lightly, _measured)):
        assert speeds[:3] == [1, 1, 1], "not known yet: one group"
        assert speeds[-1] == (2 if rank == 1 else 0)
        torch.testing.assert_close(torch.tensor(seen), torch.full((2,), 10.0))


def _sparse(strategy: AnyStrategy, steps: int) -> tuple[tuple[float, float], Any, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # every rank a host, with a shard
        ours = Drifting(strategy)
        ours.steps(steps)
        metrics, seen = ours.sync.metrics, ours.agreed()
        ours.sync.close()
    return seen, metrics, weights(ours.model)


@pytest.mark.parametrize("answers", ["half", "full"])
def test_sparse_pushes_and_their_bytes(crew: Hire, answers: str) -> None:
    """200 weights in 208 entries, half of them at either shard: in four steps three pushes of a tenth, each
    entry with an index of 2 bytes, and a whole one. The last of four answers is under way then."""
    sparse = GDTopK(epoch_steps=4, ratio=0.1, answers=answers)
    for seen, metrics, nbytes in crew(2).run(
        lightly, _sparse, GSSP(groups="0,1", staleness=1, sparse=sparse), 4
    ):
        assert seen == (4.0, 4.0), "what was kept back came with the last push of the epoch"
        assert nbytes == 832
        answer = 104 * (2 if answers == "half" else 4)
        assert metrics.bytes_left_host == 3 * 10 * 6 + 416 + 3 * answer
        assert metrics.refused == 0


def _resumed(first: int, last: int, saved: Any) -> tuple[tuple[float, float], float, Any]:
    ours = Drifting(GSSP(groups="0,1", sparse=GDTopK(epoch_steps=8, ratio=0.1, answers="full")))
    if saved is not None:
        ours.sync.load_state_dict(saved)
    ours.steps(last - first)
    state = ours.sync.state_dict()
    # Its last push is under way, and has left in `update` what it lacks.
    inside = ours.sync._session.conductor.state
    left = inside.update[0].sum().item() if inside.codec_index else 0.0
    seen = ours.agreed()
    ours.sync.close()
    return seen, left, state


def _stopped() -> list[Any]:
    _, kept, saved = _resumed(0, 5, None)
    seen, nothing, _ = _resumed(5, 8, saved)
    return [kept, seen, nothing]


def test_what_is_kept_back_is_in_a_checkpoint(crew: Hire) -> None:
    """Five steps, of which a tenth was sent each time; the rest comes after a restart, as the epoch ends."""
    for kept, seen, nothing in crew(2).run(lightly, _stopped):
        assert kept > 0.0 and nothing == 0.0
        assert seen == (8.0, 8.0)
