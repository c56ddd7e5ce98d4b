"""Strangers at the store of elastic workers: who does not know the token writes nothing that is believed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import BSP
from offbeat.core.roster import Roster
from offbeat.errors import OffbeatError
from offbeat.worlds.processes.elastic.registry import training_registry
from offbeat.worlds.processes.server.auth import TOKEN
from tests.support.elastic import LR, Bowl, ElasticCrew, Say
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_texts_are_signed_with_their_key_and_their_training(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    ours, next_one = (training_registry(store, f"training/{number}") for number in (0, 1))
    roster = Roster(1, ("a", "b")).to_text()
    assert ours.set_once("roster/1", roster).result() == roster
    assert ours.set_once("roster/1", "another").result() == ours.get("roster/1").result() == roster
    assert ours.get("roster/2").result() is None
    assert ours.add("votes", 2).result() == 2
    signed = store.get("training/0/roster/1")
    store.set("training/0/roster/2", signed)
    store.set("training/1/roster/1", signed)
    store.set("training/0/roster/3", Roster(3, ("stranger",)).to_text())
    for registry, key in ((ours, "roster/2"), (next_one, "roster/1"), (ours, "roster/3")):
        with pytest.raises(OffbeatError, match=f"'{key}' in the store is not signed with this token"):
            registry.get(key)
        with pytest.raises(OffbeatError, match="is not signed with this token"):
            registry.set_once(key, roster)


# --- in a real training


@pytest.fixture
def crew() -> Iterator[ElasticCrew]:
    hired = ElasticCrew(1)
    yield hired
    hired.dismiss()


def _train(say: Say, token: str) -> int:
    """Train until a step is made by two workers; return the number of those that made the last one."""
    os.environ[TOKEN] = token
    model = Bowl(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with offbeat.attach(model, optimizer, BSP(), elastic=True, timeout_s=HANG_S) as sync:
        say(("said", "attached"))
        made_by = 1
        while made_by == 1:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            made_by = sync.port.world
        return made_by


def test_only_those_who_know_the_token_are_admitted(crew: ElasticCrew) -> None:
    member = crew.start(_train, "secret")
    assert crew.hear(member) == ("said", "attached")
    for token, told in (("guess", "is not signed with this token"), ("", "or a worker with a token")):
        kind, text = crew.hear(crew.start(_train, token))
        assert kind == "OffbeatError" and told in text
    friend = crew.start(_train, "secret")
    assert crew.result(friend) == crew.result(member) == 2
