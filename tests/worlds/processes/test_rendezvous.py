"""The rendezvous: ranks that train different things are told so on every rank; absent ranks are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from offbeat.errors import LaunchError, MismatchError, RankLost
from offbeat.worlds.processes.rendezvous import (
    check_fingerprints,
    connect_group,
    connect_standalone,
    difference,
)
from tests.support.beside import beside
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def test_a_difference_names_three_entries_and_counts_the_others() -> None:
    assert difference({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == ""
    assert difference({"a": "1"}, {"a": "2"}) == "a is 2 there, 1 on rank 0"
    assert difference({"a": "1"}, {"b": "2"}) == (
        "a is absent there, 1 on rank 0; b is 2 there, absent on rank 0"
    )
    first, other = ({str(key): value for key in range(5)} for value in ("x", "y"))
    assert difference(first, other) == (
        "0 is y there, x on rank 0; 1 is y there, x on rank 0; 2 is y there, x on rank 0; and 2 more"
    )


def test_every_rank_is_told_which_rank_differs() -> None:
    store = dist.HashStore()
    prints = [{"model": "a"}, {"model": "a"}, {"model": "b"}]
    checks = [
        beside(check_fingerprints, store, rank, 3, fingerprint, HANG_S)
        for rank, fingerprint in enumerate(prints)
    ]
    for check in checks:
        with pytest.raises(
            MismatchError, match="rank 2 does not train what rank 0 trains: model is b there, a on rank 0"
        ):
            check.result(HANG_S)


def test_ranks_that_train_the_same_go_on() -> None:
    store = dist.HashStore()
    checks = [beside(check_fingerprints, store, rank, 2, {"model": "a"}, HANG_S) for rank in range(2)]
    assert [check.result(HANG_S) for check in checks] == [None, None]


def test_ranks_that_never_attach_are_named() -> None:
    with pytest.raises(RankLost, match=r"rank 1, 2 did not call offbeat.attach\(\) within 0 s"):
        check_fingerprints(dist.HashStore(), 0, 3, {}, 0.01)


def test_without_a_launcher_it_is_said_how_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/mine.py"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(LaunchError, match=r"torchrun --nproc-per-node 4 mine\.py"):
        connect_group(torch.device("cpu"), {}, HANG_S)


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="RANK is set, but MASTER_ADDR and MASTER_PORT is not"):
        connect_group(torch.device("cpu"), {}, HANG_S)
    assert not dist.is_initialized()


def test_a_worker_without_a_group_takes_a_free_part_of_the_data() -> None:
    port = connect_standalone(dist.HashStore(), worker=7, workers=3, timeout_s=HANG_S, bits_per_s=1e6)
    assert (port.rank, port.world, port.standalone) == (0, 3, True), "whatever its number"
    assert port.ledger.emulated, "a slower network is emulated where one is given"
