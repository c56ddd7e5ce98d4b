"""The registry in a store, and where the store is."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from offbeat.errors import LaunchError, RankLost
from offbeat.worlds.processes.elastic.registry import (
    RENDEZVOUS,
    ROOT,
    StoreRegistry,
    open_store,
    report_death,
)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_texts_and_counters(store: dist.TCPStore) -> None:
    registry = StoreRegistry(dist.PrefixStore("here", store))
    assert registry.get("a").result() is None
    assert registry.get("a").result() is None, "a look must not create the key"
    assert registry.set_once("a", "first").result() == "first"
    assert registry.set_once("a", "second").result() == "first"
    assert registry.get("a").result() == "first"
    registry.set("a", "third")
    assert registry.get("a").result() == "third"
    registry.set("a", "")
    assert registry.get("a").result() == ""
    registry.delete("a")
    assert registry.set_once("a", "again").result() == "again"
    assert [registry.add("n", 1).result(), registry.add("n", 2).result(), registry.add("n", 0).result()] == [
        1,
        3,
        3,
    ]


def test_store_that_is_gone_is_named() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    registry = StoreRegistry(dist.TCPStore("127.0.0.1", server.port, is_master=False))
    registry.set("a", "b")
    del server
    with pytest.raises(RankLost, match="the rendezvous store cannot be reached, so this worker is cut off"):
        registry.get("a")


def test_death_is_reported_where_workers_look(store: dist.TCPStore) -> None:
    report_death(store, "rank3-0")
    assert StoreRegistry(dist.PrefixStore(ROOT, store)).get("gone/rank3-0").result() is not None


def test_store_is_where_the_environment_says(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RENDEZVOUS, f"127.0.0.1:{store.port}")
    open_store(10.0).set("mark", "seen")
    assert store.get("mark") == b"seen"


def test_without_a_store_the_error_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (RENDEZVOUS, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="offbeat rendezvous HOST:PORT"):
        open_store(10.0)
    monkeypatch.setenv(RENDEZVOUS, "nowhere")
    with pytest.raises(LaunchError, match="give HOST:PORT"):
        open_store(10.0)
