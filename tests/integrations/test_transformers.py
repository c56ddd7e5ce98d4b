"""A Hugging Face Trainer with one more line."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.integrations.conformance import Outcomes, ways
from tests.integrations.conformance import (
    test_all_ranks_train_and_end_with_one_model as test_all_ranks_train_and_end_with_one_model,
)
from tests.integrations.conformance import test_bsp_is_ddp_bit_for_bit as test_bsp_is_ddp_bit_for_bit
from tests.integrations.conformance import (
    test_stopped_and_resumed_equals_never_stopped as test_stopped_and_resumed_equals_never_stopped,
)

pytestmark = pytest.mark.processes

LOOP = "transformers_loop"
WAYS = ways({}, {"stop": 30}, {"resume": "STOPPED/saved/checkpoint-30"})


def test_all_ranks_evaluate_the_same_model(outcomes: Outcomes) -> None:
    for ranks in outcomes.values():
        assert ranks[0]["losses"] == ranks[1]["losses"]
