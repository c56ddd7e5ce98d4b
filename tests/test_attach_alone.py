"""A rank alone: nothing is gathered, and it trains as the loop without Offbeat does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat import BSP, OSP, Strategy
from offbeat.core.blocks import Block
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.strategies.bsp import BSPState
from tests.conformance.features import spoilt
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

STEPS = 6


class Gathers(BSP):
    """BSP with a method changed, so that what its base promised of a worker alone does not hold."""

    def ready(self, state: BSPState, replica: Replica, block: Block, port: Port) -> None:
        super().ready(state, replica, block, port)


LOOPS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "clipping": lambda: {"clip": 0.5},
    "accumulation": lambda: {"accumulate": 2},
    "accumulation, no context": lambda: {"accumulate": 2, "no_sync": nullcontext},
    "gradients set to zero": lambda: {"set_to_none": False},
    "GradScaler that skips": lambda: {"scaler": torch.amp.GradScaler("cpu")},
    "GradScaler, accumulation": lambda: {
        "scaler": torch.amp.GradScaler("cpu"),
        "accumulate": 2,
        "no_sync": nullcontext,
    },
}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.grad is not None]


def _train(strategy: Strategy[Any] | None, loop: str, compiles: bool) -> tuple[dict[str, Tensor], Any, bool]:
    """Train; return the weights, the metrics, and whether all gradients were in memory of their own."""
    model = loops.mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = loops.momentum(model)
    sync = None if strategy is None else offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S)
    apart: list[bool] = []
    optimizer.register_step_pre_hook(
        lambda *_: apart.extend(p.grad.untyped_storage().nbytes() == p.nbytes for p in trained(model))
    )
    options: dict[str, Any] = {} if sync is None else {"no_sync": sync.no_sync, "samples": sync.samples}
    data = loops.batches(0, STEPS)
    if "GradScaler" in loop:
        data = spoilt(data, at=2)
    called = torch.compile(model, backend="aot_eager") if compiles else model
    loops.train(called, optimizer, data, **options | LOOPS[loop]())  # type: ignore[arg-type]
    if sync is not None:
        sync.close()
    assert apart, "no step was made"
    return loops.tensors(model), None if sync is None else sync.metrics, all(apart)


CASES = [(loop, False) for loop in LOOPS] + [("accumulation, no context", True)]


@pytest.mark.parametrize(("loop", "compiles"), CASES)
def test_alone_a_rank_trains_as_without_offbeat(crew, loop: str, compiles: bool) -> None:
    rank = crew(1)
    ((bare, _, _),) = rank.run(_train, None, loop, compiles)
    ((gathered, counted, apart),) = rank.run(_train, Gathers(), loop, compiles)
    assert loops.equal(bare, gathered)
    assert not apart
    for strategy in (BSP(), BSP(codec=offbeat.TopK(0.1)), OSP()):
        ((alone, metrics, apart),) = rank.run(_train, strategy, loop, compiles)
        assert loops.equal(bare, alone), strategy
        assert apart, strategy
        assert (metrics.steps, metrics.samples) == (counted.steps, counted.samples)
        assert metrics.bytes_sent == metrics.sync_steps == 0
