"""SSD-SGD by itself: what it refuses, and that a steady step makes no tensor of the model's size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offbeat import SSDSGD, SettingError
from offbeat.core.conductor import Conductor
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.ledger import Ledger
from offbeat.core.replica import Replica
from tests.support.allocations import largest_allocation
from tests.support.silent_peers import Alone


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"delay": 0}, "delay=0: a whole number of steps, at least 1"),
        ({"delay": 2.5}, "delay=2.5"),
        ({"warmup": -1}, "warmup=-1: a whole number of steps, 0 or more"),
        ({"alpha": -0.1}, "alpha=-0.1: a finite number, 0 or more"),
        ({"beta": float("inf")}, "beta=inf"),
        ({"beta": "much"}, "beta='much'"),
        ({"scaling": 0.0}, "scaling=0.0: a finite number above 0"),
        ({"scaling": float("nan")}, "scaling=nan"),
        ({"staggered": "yes"}, "staggered='yes': True or False, or None"),
        ({"staggered": 0}, "staggered=0"),
        ({"rule": "mine"}, "rule='mine'"),
        ({"alpha": 1.0}, "alpha=1.0: only with rule='authors'"),
        ({"beta": 0.5}, "beta=0.5: only with rule='authors'"),
        ({"scaling": 2.0}, "scaling=2.0: only with rule='authors'"),
        ({"staggered": True, "on": "server"}, "only with on='collectives'; a server answers a pull with all"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        SSDSGD(**bad)


@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("rule", ["carried", "authors"])
def test_a_steady_step_makes_nothing_of_the_models_size(rule: str, world: int, staggered: bool) -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    # fused: torch's other ways to step make tensors of their own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)
    replica = Replica(model, optimizer=optimizer)
    lay_out_gradients(replica)
    for block in replica.blocks:
        for param, home in zip(block.params, block.grad_views, strict=True):
            param.grad = home
    strategy, ledger = SSDSGD(rule=rule, warmup=0, delay=2, staggered=staggered), Ledger(0, lambda: 0.0)
    conductor = Conductor(strategy, replica, Alone(0, world), ledger)  # type: ignore[arg-type]
    nbytes = sum(weight.nbytes for weight in replica.weights)
    assert largest_allocation(5, conductor, optimizer) > nbytes / world, (
        "buffers are made once, and the test sees it"
    )
    assert largest_allocation(5, conductor, optimizer) < 1000
