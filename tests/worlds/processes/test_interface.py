"""The interface that gloo takes: the way to the store, where this host's own name leads to loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.support.hosts import Hosts

from offbeat.worlds.processes import interface
from offbeat.worlds.processes.interface import GLOO, choose_interface
from tests.support.host_processes import HostProcess, needs_namespaces

pytestmark = pytest.mark.processes

HERE, AWAY = "127.0.0.1", "10.99.0.1"
TRAINING = f"""
sys.path[:0] = {[str(Path(__file__).parents[3])]!r}
import torch, offbeat
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.attach(model, optimizer, offbeat.BSP()) as sync:
    model(torch.full((1, 4), 1.0 + sync.port.rank)).sum().backward()
    optimizer.step()
    print("moved by", os.environ["{GLOO}"], flush=True)
"""


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "")  # so that it is as before in the end
    monkeypatch.delenv(GLOO)


@pytest.mark.parametrize(
    ("by_name", "towards", "chosen"),
    [(HERE, AWAY, "eth7"), ("10.1.1.1", AWAY, None), (HERE, HERE, None)],
    ids=["no other host would reach it", "gloo finds one by itself", "all ranks are here"],
)
def test_interface_is_chosen_where_gloo_would_take_loopback(
    monkeypatch: pytest.MonkeyPatch, by_name: str, towards: str, chosen: str | None
) -> None:
    monkeypatch.setattr(interface, "_address_by_name", lambda: by_name)
    monkeypatch.setattr(interface, "local_address_towards", lambda *_: towards)
    monkeypatch.setattr(interface, "_interface_of", {AWAY: "eth7", HERE: "lo"}.get)
    choose_interface("store", 1)
    assert os.environ.get(GLOO) == chosen


def test_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "mine")
    monkeypatch.setattr(interface, "local_address_towards", lambda *_: AWAY)
    choose_interface("store", 1)
    assert os.environ[GLOO] == "mine"


def test_interface_is_found_by_its_address() -> None:
    assert interface._interface_of(HERE) == "lo"
    assert interface._interface_of("203.0.113.1") == ""


@needs_namespaces
def test_ranks_of_two_hosts_meet_though_their_name_is_loopback() -> None:
    with Hosts(count=2, rate="1gbit") as hosts:
        where = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500"}
        ranks = [HostProcess(hosts, rank, "-c", TRAINING, RANK=str(rank), **where) for rank in range(2)]
        for rank in ranks:
            code, said = rank.end()
            assert code == 0, said
            assert "moved by eth0" in said
