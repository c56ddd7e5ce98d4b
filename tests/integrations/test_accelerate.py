"""Accelerate's loop, unchanged but for one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate")

from safetensors.torch import load_file

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

pytestmark = pytest.mark.processes

LOOP = "accelerate_loop"
WAYS = {
    **ways({}, {"stop": 60}, {"resume": "STOPPED/saved", "done": 60}),
    "two models": {"how": "local_sgd", "settings": {"period": 100}, "models": 2},
}


def saved_model(out: Path) -> dict[str, Tensor]:
    return dict(load_file(out / "saved" / "model.safetensors"))


def test_accumulation_sends_nothing_until_the_step(outcomes: Outcomes) -> None:
    rank = outcomes["bsp"][0]
    nbytes = sum(value.nbytes for value in rank["state"].values())
    assert rank["sent"] < 1.5 * STEPS * nbytes, "twice that if every backward sent"


def test_two_models_of_one_accelerator_are_saved_and_loaded(outcomes: Outcomes) -> None:
    """The ranks differ between two averages, and so do the models: each has its own state again."""
    for rank in outcomes["two models"]:
        assert all(map(torch.equal, rank["saved"], rank["loaded"]))
        assert not any(map(torch.equal, rank["saved"], rank["later"]))
        assert not torch.equal(*rank["loaded"])
        files = {path.name for path in (rank["out"] / "saved when closed").iterdir()}
        assert files and not any(name.startswith("offbeat") for name in files)
    one, other = outcomes["two models"]
    assert not any(map(torch.equal, one["saved"], other["saved"]))
