"""The number of shards on each host: who decides, and whether links are measured for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.worlds.processes.server import shard_count
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.server.shard_count import PIECES, asked_pieces
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.store import DeadlineStore
from tests.support.limits import HANG_S

SPEC = ServerSpec(
    strategy="asp",
    settings={},
    flats=[("float32", 4)],
    optimizer=None,
    description={"model": "Linear"},
    timeout_s=HANG_S,
)


@pytest.mark.parametrize(("asked", "pieces"), [("", 0), ("3", 3), ("auto", 0)])
def test_as_many_shards_on_a_host_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, pieces: int
) -> None:
    monkeypatch.setenv(PIECES, asked)
    assert asked_pieces() == pieces
    assert asked_pieces("1") == (pieces if asked else 1), "a dedicated server's, whose links nobody knows"


LARGE = replace(SPEC, flats=[("float32", 1 << 20)])


class Rank:
    """What a rank's port says when shards are counted."""

    world = 4

    def __init__(self, rank: int, bytes_per_s: float, shaper: object = None) -> None:
        self.rank, self.bytes_per_s, self.shaper = rank, bytes_per_s, shaper
        self.measured = 0

    def shards_of_a_host(self, store: SignedStore, spec: ServerSpec = LARGE, hosts: int = 4) -> int:
        def measure(*_: object) -> float:
            self.measured += 1
            return self.bytes_per_s

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_count, "measure_link_rate", measure)
            return shard_count.shared_pieces(self, store, spec, hosts, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.fixture
def store() -> SignedStore:
    return SignedStore(DeadlineStore(dist.HashStore(), HANG_S), b"secret")


def test_all_ranks_go_by_the_rate_that_rank_0_has_measured(store: SignedStore) -> None:
    ranks = [Rank(0, 6e6), Rank(1, 1e9), Rank(2, 1e6)]
    assert [rank.shards_of_a_host(store) for rank in ranks] == [16, 16, 16]
    assert [rank.measured for rank in ranks] == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "shaper", "asked", "shards"),
    [
        ({"hosts": 1}, None, "", 1),
        ({}, object(), "", 1),
        ({"spec": SPEC}, None, "", 1),
        ({"spec": replace(LARGE, cuts_anywhere=False)}, None, "", 1),
        ({}, None, "3", 3),
        ({"hosts": 1}, None, "3", 3),
    ],
    ids=["one host", "emulated links", "small", "cuts nowhere", "asked", "asked on one host"],
)
def test_where_the_rate_does_not_decide_nobody_measures_it(
    store: SignedStore,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    shaper: object,
    asked: str,
    shards: int,
) -> None:
    monkeypatch.setenv(PIECES, asked)
    ranks = [Rank(rank, 6e6, shaper) for rank in range(2)]
    assert [rank.shards_of_a_host(store, **changes) for rank in ranks] == [shards, shards]
    assert [rank.measured for rank in ranks] == [0, 0]


@pytest.mark.parametrize("asked", ["0", "65", "-1", "2.5", "many"])
def test_no_other_number_of_shards_is_accepted(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(PIECES, asked)
    with pytest.raises(offbeat.SettingError, match=f"OFFBEAT_PIECES={asked}: a whole number from 1 to 64"):
        asked_pieces()
