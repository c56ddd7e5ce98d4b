"""SignedStore: what holders of the token have written comes back, and nothing else does."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from offbeat.errors import OffbeatError
from offbeat.worlds.processes.server.auth import run_token
from offbeat.worlds.processes.server.signed_store import SignedStore
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def test_values_come_back_as_they_were() -> None:
    store = dist.HashStore()
    ours, theirs = SignedStore(store, b"secret"), SignedStore(store, b"secret")
    assert theirs.find("key") is None
    for value in ("", "1", "two words", "ends in a blank ", "ü {}\n"):
        ours.set("key", value)
        assert theirs.get("key") == theirs.get("key", HANG_S) == theirs.find("key") == value
    assert ours.propose("first", "mine") == "mine"
    assert theirs.propose("first", "theirs") == "mine", "the first proposal counts"


def test_what_is_not_there_is_waited_for() -> None:
    with pytest.raises(RuntimeError):
        SignedStore(dist.HashStore(), b"secret").get("key", 0.1)


def test_nothing_is_believed_that_was_forged_moved_or_kept_from_another_run() -> None:
    store = dist.HashStore()
    signed = SignedStore(store, b"secret")
    signed.set("key", "value")
    signed.set("other", "value")
    SignedStore(store, run_token(b"secret", b"yesterday")).set("earlier", "value")
    true = store.get("key")
    for forged in (b"value", true[:-1], true + b" ", b"0" + true[1:], store.get("other"), b"\xff" * 99):
        store.set("key", forged)
        for read in (signed.get, signed.find, lambda key: signed.propose(key, "value")):
            with pytest.raises(OffbeatError, match="'key' in the store is not signed with this token"):
                read("key")
    with pytest.raises(OffbeatError, match="not signed"):
        signed.get("earlier")
