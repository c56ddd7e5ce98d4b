"""The rendezvous: ranks that train different things are told so on every rank; absent ranks are named."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import offbeat
from offbeat.core.port import Lane
from offbeat.errors import LaunchError, MismatchError, RankLost, SettingError
from offbeat.worlds.processes.rendezvous import (
    check_fingerprints,
    connect_group,
    connect_standalone,
    difference,
)
from tests.support.beside import beside
from tests.support.limits import HANG_S, SILENCE_S

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
    with pytest.raises(RankLost, match=r"rank 1, 2 did not call offbeat.attach\(\) within 3 s"):
        check_fingerprints(dist.HashStore(), 0, 3, {}, SILENCE_S)


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


# --- one rank is slower than another


def _refused_after_connecting() -> tuple[str, bool]:
    """Attach what is refused after connecting; rank 1 lingers between its groups and what follows.

    Return the refusal, and whether rank 0 had left `attach` by then.
    """
    rank = dist.get_rank()
    store = dist.PrefixStore("left", _get_default_store())
    left: list[bool] = []

    def new_group(**options: Any) -> Any:
        made.append(dist_new_group(**options))
        if rank == 1 and len(made) == len(Lane):
            with suppress(RuntimeError):  # torch's timeout
                store.wait(["0"], timedelta(seconds=SILENCE_S))
            left.append(store.check(["0"]))
        return made[-1]

    made: list[Any] = []
    dist_new_group = dist.new_group
    model = nn.Linear(2, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        try:
            optimizer = torch.optim.LBFGS(model.parameters())
            offbeat.attach(model, optimizer, offbeat.SSP(push="gradient"), timeout_s=HANG_S)
        except SettingError as refusal:
            store.set(str(rank), "")
            return str(refusal), any(left)
    return "not refused", False


def test_who_is_refused_does_not_close_its_groups_while_others_connect(crew) -> None:
    for text, too_early in crew(2).run(_refused_after_connecting):
        assert "cannot run a LBFGS" in text
        assert not too_early


def _cannot_connect() -> str:
    def new_group(**options: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no route\nmore of torch's words")
        return None

    model = nn.Linear(2, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        with pytest.raises(RankLost) as told:
            offbeat.attach(model, torch.optim.SGD(model.parameters()), offbeat.BSP(), timeout_s=HANG_S)
    return str(told.value)


def test_all_ranks_hear_at_once_of_one_that_cannot_connect(crew) -> None:
    assert crew(2).run(_cannot_connect) == ["rank 1 could not connect to the others: no route"] * 2
