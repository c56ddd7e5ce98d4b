"""SignedStore: what holders of the token have written comes back, and nothing else does."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from offbeat.errors import OffbeatError, RankLost
from offbeat.worlds.processes.server.auth import run_token
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.store import DeadlineStore
from tests.support.limits import SILENCE_S

pytestmark = pytest.mark.processes


def test_values_come_back_as_they_were() -> None:
    store = DeadlineStore(dist.HashStore())
    ours, theirs = SignedStore(store, b"secret"), SignedStore(store, b"secret")
    assert theirs.find("key") is None
    for value in ("", "1", "two words", "ends in a blank ", "ü {}\n"):
        ours.set("key", value)
        assert theirs.get("key") == theirs.find("key") == value
    assert ours.propose("first", "mine") == "mine"
    assert theirs.propose("first", "theirs") == "mine", "the first proposal counts"
    assert theirs.replace("first", "another", "theirs") == "mine"
    assert theirs.replace("first", "mine", "theirs") == "theirs" == ours.get("first")


def test_what_is_not_there_is_waited_for() -> None:
    store = DeadlineStore(dist.HashStore(), SILENCE_S)
    with pytest.raises(RankLost, match="the other processes have not set 'key'"):
        SignedStore(store, b"secret").get("key")


def test_nothing_is_believed_that_was_forged_moved_or_kept_from_another_run() -> None:
    store = dist.HashStore()
    signed = SignedStore(DeadlineStore(store), b"secret")
    signed.set("key", "value")
    signed.set("other", "value")
    SignedStore(DeadlineStore(store), run_token(b"secret", b"yesterday")).set("earlier", "value")
    true = store.get("key")
    for forged in (b"value", true[:-1], true + b" ", b"0" + true[1:], store.get("other"), b"\xff" * 99):
        store.set("key", forged)
        propose, replace = (lambda key: signed.propose(key, "a")), (lambda key: signed.replace(key, "a", "b"))
        for read in (signed.get, signed.find, propose, replace):
            with pytest.raises(OffbeatError, match="'key' in the store is not signed with this token"):
                read("key")
    with pytest.raises(OffbeatError, match="not signed"):
        signed.get("earlier")
