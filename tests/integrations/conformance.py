"""What holds in every framework. A module of tests names its LOOP, and the WAYS to run it."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.strategies import STRATEGIES
from tests.integrations.conftest import Outcome, check_like_ddp, same
from tests.integrations.loops.common import SCALE

STEPS = 50  # of 100 batches, two of which are accumulated
SLOWLY: dict[str, Any] = {"how": "local_sgd", "settings": {"period": 7}}
TRAINED = [name for name in STRATEGIES.own if name != "bsp"]
SETTINGS: dict[str, dict[str, Any]] = {
    "gssp": {"groups": "0-1"},
    "ssd_sgd": {"warmup": 10},
    "sparse_loco": {"period": 4, "ratio": 0.5},  # of so few weights, two in a hundred are hardly any
}
Outcomes = dict[str, list[Outcome]]  # by way and rank


def strategies() -> dict[str, dict[str, Any]]:
    """Return DDP, and every strategy."""
    return {how: {"how": how, "settings": SETTINGS.get(how, {})} for how in ("ddp", "bsp", *TRAINED)}


def in_float16(device: str) -> dict[str, dict[str, Any]]:
    """Return DDP and strategies with a GradScaler that skips the first steps."""
    common = {"precision": "fp16", "device": device}
    return {
        "ddp in fp16": {"how": "ddp", **common},
        "bsp in fp16": {"how": "bsp", **common},
        "local_sgd in fp16": {**SLOWLY, **common},
    }


def ways(whole: dict[str, Any], part: dict[str, Any], rest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return DDP, strategies, and a run that is whole, stopped after a part, and resumed for the rest.

    What the stopped run saves lies in the folder STOPPED.
    """
    return {
        **strategies(),
        "ddp in bf16": {"how": "ddp", "precision": "bf16"},
        "bsp in bf16": {"how": "bsp", "precision": "bf16"},
        **in_float16("cpu"),
        "never stopped": {**SLOWLY, **whole},
        "stopped": {**SLOWLY, **part},
        "resumed": {**SLOWLY, **rest},
    }


def test_bsp_is_ddp_bit_for_bit(outcomes: Outcomes) -> None:
    check_like_ddp(outcomes["ddp"], outcomes["bsp"])
    assert [rank["steps"] for rank in outcomes["bsp"]] == [STEPS, STEPS]


def test_bsp_is_ddp_bit_for_bit_in_bf16(outcomes: Outcomes) -> None:
    check_like_ddp(outcomes["ddp in bf16"], outcomes["bsp in bf16"])
    assert not same(outcomes["bsp in bf16"][0], outcomes["bsp"][0]), "computed in single precision"


def test_bsp_is_ddp_where_scalers_skip(outcomes: Outcomes) -> None:
    theirs, ours = outcomes["ddp in fp16"], outcomes["bsp in fp16"]
    check_like_ddp(theirs, ours)
    assert [rank["scale"] for rank in ours] == [rank["scale"] for rank in theirs]
    assert all(1 < rank["scale"] < SCALE for rank in ours), "a step that is skipped halves the scale"
    assert [rank["steps"] for rank in ours] == [STEPS, STEPS], "of which some were skipped"


def test_ranks_with_scalers_that_skip_train(outcomes: Outcomes) -> None:
    ranks = outcomes["local_sgd in fp16"]
    assert same(*ranks)
    assert all(1 < rank["scale"] < SCALE for rank in ranks)
    assert all(rank["steps"] == STEPS for rank in ranks)
    assert all(rank["accuracy"] > 0.7 for rank in ranks), [rank["accuracy"] for rank in ranks]


@pytest.mark.parametrize("way", TRAINED)
def test_all_ranks_train_and_end_with_one_model(outcomes: Outcomes, way: str) -> None:
    assert same(*outcomes[way])
    assert all(rank["steps"] == STEPS for rank in outcomes[way])
    assert all(rank["accuracy"] > 0.7 for rank in outcomes[way]), [rank["accuracy"] for rank in outcomes[way]]


def test_stopped_and_resumed_equals_never_stopped(outcomes: Outcomes) -> None:
    for whole, resumed in zip(outcomes["never stopped"], outcomes["resumed"], strict=True):
        assert same(whole, resumed)
    assert not same(outcomes["stopped"][0], outcomes["resumed"][0])


def test_checkpoint_has_the_model_that_all_ranks_share(
    outcomes: Outcomes, request: pytest.FixtureRequest
) -> None:
    """The stopped run ends between two averages, so each rank's own weights are others."""
    for rank in outcomes["stopped"]:
        assert same({"state": request.module.saved_model(rank["out"])}, rank)
