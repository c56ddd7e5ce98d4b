"""Accelerate's loop, unchanged but for one line."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

from tests.integrations.conftest import Outcome, Run, check_like_ddp, same

pytestmark = pytest.mark.processes

STEPS = 50  # of 100 batches, two of which are accumulated
SLOWLY = {"how": "local_sgd", "settings": {"period": 7}}
WAYS = {
    "ddp": {"how": "ddp"},
    "bsp": {"how": "bsp"},
    "local_sgd": {"how": "local_sgd"},
    "diloco": {"how": "diloco"},
    "osp": {"how": "osp"},
    "selsync": {"how": "selsync"},
    "ssp": {"how": "ssp"},
    "never stopped": SLOWLY,
    "stopped": {**SLOWLY, "stop": 60},
    "resumed": {**SLOWLY, "resume": "FOLDER/8/saved", "done": 60},
}


@pytest.fixture(scope="module")
def outcomes(run: Run) -> dict[str, list[Outcome]]:
    return dict(zip(WAYS, run("accelerate_loop", *WAYS.values()), strict=True))


def test_bsp_is_ddp_bit_for_bit(outcomes: dict[str, list[Outcome]]) -> None:
    check_like_ddp(outcomes["ddp"], outcomes["bsp"])
    assert [rank["steps"] for rank in outcomes["bsp"]] == [STEPS, STEPS]


@pytest.mark.parametrize("way", ["local_sgd", "diloco", "osp", "selsync", "ssp"])
def test_strategies_train_and_all_ranks_end_with_one_model(
    outcomes: dict[str, list[Outcome]], way: str
) -> None:
    assert same(*outcomes[way])
    assert all(rank["steps"] == STEPS for rank in outcomes[way])
    assert all(rank["accuracy"] > 0.7 for rank in outcomes[way]), [rank["accuracy"] for rank in outcomes[way]]


def test_stopped_and_resumed_equals_never_stopped(outcomes: dict[str, list[Outcome]]) -> None:
    for whole, resumed in zip(outcomes["never stopped"], outcomes["resumed"], strict=True):
        assert same(whole, resumed)
    assert not same(outcomes["stopped"][0], outcomes["resumed"][0])


def test_accumulation_sends_nothing_until_the_step(outcomes: dict[str, list[Outcome]]) -> None:
    rank = outcomes["bsp"][0]
    nbytes = sum(value.nbytes for value in rank["state"].values())
    assert rank["sent"] < 1.5 * STEPS * nbytes, "twice that if every backward sent"
