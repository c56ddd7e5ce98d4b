"""A Hugging Face Trainer with one more line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import TrainingArguments

from offbeat import BSP, SSP, LocalSGD
from offbeat.integrations.transformers import warn_of_waits
from tests.integrations.conformance import Outcomes, ways
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

LOOP = "transformers_loop"
WAYS = ways({}, {"stop": 30}, {"resume": "STOPPED/saved/checkpoint-30"})


def saved_model(out: Path) -> dict[str, Tensor]:
    return dict(load_file(out / "saved" / "checkpoint-30" / "model.safetensors"))


def test_all_ranks_evaluate_the_same_model(outcomes: Outcomes) -> None:
    for ranks in outcomes.values():
        assert ranks[0]["losses"] == ranks[1]["losses"]


@pytest.mark.parametrize(
    ("strategy", "averages", "warned"),
    [(LocalSGD(), True, True), (SSP(), True, True), (LocalSGD(), False, False), (BSP(), True, False)],
)
def test_waits_of_the_trainer_are_told(
    strategy: Any, averages: bool, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = TrainingArguments(str(tmp_path), average_tokens_across_devices=averages)
    with caplog.at_level("WARNING", logger="offbeat"):
        warn_of_waits(arguments, strategy)
    assert bool(caplog.records) is warned
    assert all(strategy.name in record.getMessage() for record in caplog.records)
