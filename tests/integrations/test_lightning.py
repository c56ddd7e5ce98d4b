"""Lightning's Trainer with another strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning")

from tests.integrations.conformance import STEPS, Outcomes, ways
from tests.integrations.conformance import (
    test_all_ranks_train_and_end_with_one_model as test_all_ranks_train_and_end_with_one_model,
)
from tests.integrations.conformance import test_bsp_is_ddp_bit_for_bit as test_bsp_is_ddp_bit_for_bit
from tests.integrations.conformance import (
    test_bsp_is_ddp_bit_for_bit_in_bf16 as test_bsp_is_ddp_bit_for_bit_in_bf16,
)
from tests.integrations.conformance import (
    test_bsp_is_ddp_where_scalers_skip as test_bsp_is_ddp_where_scalers_skip,
)
from tests.integrations.conformance import (
    test_checkpoint_has_the_model_that_all_ranks_share as test_checkpoint_has_the_model_that_all_ranks_share,
)
from tests.integrations.conformance import (
    test_ranks_with_scalers_that_skip_train as test_ranks_with_scalers_that_skip_train,
)
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
    "apart": {"how": "local_sgd", "settings": {"period": 16}, "apart": True},
    "ddp of the demo": {"how": "ddp", "demo": True},
    "bsp of the demo": {"how": "bsp", "demo": True},
}


def saved_model(out: Path) -> dict[str, Tensor]:
    state = torch.load(out / "saved" / "epoch=0.ckpt", weights_only=False)["state_dict"]
    return {name.removeprefix("net."): value for name, value in state.items()}


def test_two_optimizers_that_are_stepped_by_hand(outcomes: Outcomes) -> None:
    check_like_ddp(outcomes["ddp by hand"], outcomes["bsp by hand"])
    assert outcomes["bsp by hand"][0]["steps"] == 2 * STEPS


def test_demo_of_lightning_trains_what_it_trains_under_ddp(outcomes: Outcomes) -> None:
    check_like_ddp(outcomes["ddp of the demo"], outcomes["bsp of the demo"])
    assert outcomes["bsp of the demo"][0]["steps"] > 10


def test_all_ranks_validate_the_same_model(outcomes: Outcomes) -> None:
    for ranks in (outcomes["never stopped"], outcomes["ssp"]):
        assert len(ranks[0]["shown"]) >= 5
        assert all(map(torch.equal, ranks[0]["shown"], ranks[1]["shown"]))


def test_strategies_are_known_by_name(outcomes: Outcomes) -> None:
    for named, given in zip(outcomes["by name"], outcomes["local_sgd"], strict=True):
        assert same(named, given)


def test_no_rank_waits_for_rank_0_between_two_exchanges(outcomes: Outcomes) -> None:
    """Lightning itself lets all ranks wait for rank 0 before each batch: this would not end."""
    first, second = outcomes["apart"]
    assert first["steps"] == second["steps"] == STEPS
    assert same(first, second)
