"""Lightning's Trainer with another strategy."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from tests.integrations.conformance import STEPS, Outcomes, ways
from tests.integrations.conformance import (
    test_all_ranks_train_and_end_with_one_model as test_all_ranks_train_and_end_with_one_model,
)
from tests.integrations.conformance import test_bsp_is_ddp_bit_for_bit as test_bsp_is_ddp_bit_for_bit
from tests.integrations.conformance import (
    test_stopped_and_resumed_equals_never_stopped as test_stopped_and_resumed_equals_never_stopped,
)
from tests.integrations.conftest import check_like_ddp, same

pytestmark = pytest.mark.processes

LOOP = "lightning_loop"
WAYS = {
    **ways({"epochs": 2}, {"epochs": 1}, {"epochs": 2, "resume": "STOPPED/saved/epoch=0.ckpt"}),
    "ddp by hand": {"how": "ddp", "manual": True},
    "bsp by hand": {"how": "bsp", "manual": True},
    "by name": {"how": "local_sgd", "by_name": True},
}


def test_two_optimizers_that_are_stepped_by_hand(outcomes: Outcomes) -> None:
    check_like_ddp(outcomes["ddp by hand"], outcomes["bsp by hand"])
    assert outcomes["bsp by hand"][0]["steps"] == 2 * STEPS


def test_strategies_are_known_by_name(outcomes: Outcomes) -> None:
    for named, given in zip(outcomes["by name"], outcomes["local_sgd"], strict=True):
        assert same(named, given)
