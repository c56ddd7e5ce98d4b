"""What can be elastic, and what is refused, with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import ASP, BSP, OSP, SSDSGD, SSP, DiLoCo, ErrorFeedback, LocalSGD, Quantize, SelSync, TopK
from offbeat.core.elastic import check_elastic
from offbeat.errors import MismatchError, RankLost, SettingError
from offbeat.worlds.processes.elastic.registry import RENDEZVOUS
from tests.support.elastic import Bowl

REFUSED = [
    (SSDSGD(on="server"), 2, "has a parameter server"),
    (SSP(), 2, "has a parameter server"),
    (ASP(), 2, "has a parameter server"),
    (OSP(on="server"), 2, "has a parameter server"),
    (OSP(), 1, "minimum must be 2"),
    (LocalSGD(weighted=True), 1, "would not add up to 1"),
    (BSP(codec=TopK(0.1)), 1, "minimum must be 2"),
    (BSP(codec=Quantize(8)), 2, "by way of owners"),
    (LocalSGD(codec=ErrorFeedback(Quantize(4))), 2, "by way of owners"),
    (DiLoCo(codec=Quantize(8)), 2, "by way of owners"),
    (BSP(), 0, "at least 1"),
]
ACCEPTED = [
    (BSP(), 1),
    (LocalSGD(), 1),
    (DiLoCo(), 1),
    (SelSync(), 1),
    (OSP(budget=0), 1),
    (SSDSGD(), 1),
    (OSP(codec=Quantize(8)), 2),  # in one phase there
    (BSP(codec=ErrorFeedback(TopK(0.1))), 2),
]


@pytest.mark.parametrize(("strategy", "minimum", "reason"), REFUSED, ids=str)
def test_refused_with_the_reason(strategy: Any, minimum: int, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        check_elastic(strategy, minimum)


@pytest.mark.parametrize(("strategy", "minimum"), ACCEPTED, ids=str)
def test_accepted(strategy: Any, minimum: int) -> None:
    check_elastic(strategy, minimum)


def attach(**options: Any) -> offbeat.Sync:
    model = Bowl(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return offbeat.attach(model, optimizer, BSP(), elastic=True, **options)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(RENDEZVOUS, f"127.0.0.1:{made.port}")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    return made


def test_emulated_bandwidth_is_refused() -> None:
    with pytest.raises(SettingError, match="bandwidth="):
        attach(bandwidth="1gbit")


def test_a_world_of_one_trains_closes_and_trains_again(store: dist.TCPStore) -> None:
    for _ in range(2):
        with attach() as sync:
            with pytest.raises(SettingError, match="has an elastic attachment already"):
                attach()
            model: Any = sync._session.replica.model
            for _ in range(3):
                model().backward()
                sync._optimizers[0].step()
            assert (sync.clock, sync.metrics.steps, sync.port.world) == (3, 3, 1)


def test_worker_that_comes_when_all_have_ended_is_told_what_to_do(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store remembers the roster: started again, a worker would be told the same again and again."""
    for is_first in (True, False):
        monkeypatch.setattr("offbeat.worlds.processes.elastic.connect._trainings", 8)
        if is_first:
            attach().close()
        else:
            with pytest.raises(RankLost, match=r"gone.*: start the store, too, and all workers again"):
                attach()


def test_worker_that_trains_something_else_is_told_so(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.worlds.processes.elastic.connect._trainings", 7)
    store.set("offbeat/elastic/training/7/fingerprint", json.dumps({"strategy": "LocalSGD()"}))
    with pytest.raises(MismatchError, match="does not train what the others train: strategy is BSP"):
        attach()
