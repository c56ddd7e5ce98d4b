"""Bootstrap: how a worker and a server find each other and agree on what the server holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.core.replica import Replica
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.bootstrap import (
    Rendezvous,
    parse_address,
    required_token,
)
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.store import DeadlineStore
from tests.support.limits import HANG_S, SILENCE_S
from tests.support.served import serve as serve

pytestmark = pytest.mark.processes


def test_what_is_no_server_is_told_apart_after_the_timeout() -> None:
    """A store at which nobody ever puts anything up."""
    with pytest.raises(
        offbeat.LaunchError, match="nowhere:9 has published nothing for 3 s: is it `offbeat serve`"
    ):
        Rendezvous.of(DeadlineStore(dist.HashStore(), SILENCE_S), "nowhere", 9, b"secret")


@pytest.fixture
def rendezvous() -> Rendezvous:
    return Rendezvous(DeadlineStore(dist.HashStore(), HANG_S), "nowhere", 9, "run", b"secret")


SPEC = ServerSpec(
    strategy="asp",
    settings={},
    flats=[("float32", 4)],
    optimizer=None,
    description={"model": "Linear"},
    timeout_s=HANG_S,
)


@pytest.mark.parametrize("address", ["nowhere", ":9", "host:", "host:x", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(offbeat.LaunchError, match=f"'{address}' is not an address: write HOST:PORT"):
        parse_address(address)


def test_an_address_is_a_host_and_a_port() -> None:
    assert parse_address("10.0.0.1:29600") == ("10.0.0.1", 29600)
    assert parse_address("::1:80") == ("::1", 80)


def test_a_token_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    assert required_token() == b"secret"
    monkeypatch.setenv(TOKEN, "")
    with pytest.raises(offbeat.LaunchError, match=f"set {TOKEN} to the secret"):
        required_token()


def test_a_server_with_another_token_is_refused() -> None:
    server = Rendezvous.start("127.0.0.1", 0, b"secret", workers=3, shards=2)
    address = f"127.0.0.1:{server.tcp_port}"
    worker = Rendezvous.at(address, b"secret", HANG_S)
    assert (worker.number("workers"), worker.number("shards")) == (3, 2)
    assert (worker.run, worker.token, worker.prefix) == (server.run, server.token, server.prefix)
    assert worker.token != b"secret", "nothing of another run with the same token counts in this one"
    with pytest.raises(
        offbeat.LaunchError, match=f"the server at {address} has another token: check {TOKEN}"
    ):
        Rendezvous.at(address, b"guess", HANG_S)


def test_what_a_stranger_writes_to_the_store_is_refused() -> None:
    server = Rendezvous.start("127.0.0.1", 0, b"secret", workers=1, shards=1)
    stranger = dist.TCPStore("127.0.0.1", server.tcp_port, is_master=False, wait_for_workers=False)
    assert stranger.check([f"{server.prefix}/shards"])
    stranger.set(f"{server.prefix}/shards", "2")
    stranger.set(f"{server.prefix}/initializes", "0")
    stranger.set(f"{server.prefix}/spec", "{}")
    worker = Rendezvous.at(f"127.0.0.1:{server.tcp_port}", b"secret", HANG_S)
    for key, use in {
        "shards": lambda: worker.number("shards"),
        "initializes": worker.claim_initialization,
        "spec": server.wait_for_spec,
    }.items():
        with pytest.raises(offbeat.OffbeatError, match=f"'{key}' in the store is not signed with this token"):
            use()


def test_no_secret_is_in_the_store() -> None:
    server = Rendezvous.start("127.0.0.1", 0, b"a token of the user", workers=1, shards=1)
    worker = Rendezvous.at(f"127.0.0.1:{server.tcp_port}", b"a token of the user", HANG_S)
    worker.propose(SPEC)
    assert worker.worker == 0 and worker.claim_initialization()
    stranger = dist.TCPStore("127.0.0.1", server.tcp_port, is_master=False, wait_for_workers=False)
    values = [stranger.get(key) for key in stranger.list_keys()]
    assert len(values) >= 6
    for secret in (b"a token of the user", server.token):
        assert not [value for value in values if secret in value]


def test_every_worker_has_a_number_of_its_own_and_one_gives_the_weights(rendezvous: Rendezvous) -> None:
    workers = [replace(rendezvous) for _ in range(3)]
    assert [worker.worker for worker in workers] == [0, 1, 2]
    assert [worker.worker for worker in workers] == [0, 1, 2], "it keeps its number"
    claims = [workers[rank].claim_initialization() for rank in (1, 0, 2, 1)]
    assert claims == [True, False, False, True]


def test_the_first_proposal_counts_and_others_must_be_the_same(rendezvous: Rendezvous) -> None:
    rendezvous.propose(SPEC)
    rendezvous.propose(replace(SPEC, timeout_s=1.0))  # not part of what is trained
    assert rendezvous.wait_for_spec().timeout_s == HANG_S
    with pytest.raises(
        offbeat.MismatchError,
        match="this worker does not train what the server holds: model is Conv there, Linear on rank 0",
    ):
        rendezvous.propose(replace(SPEC, description={"model": "Conv"}))


def test_another_worker_brings_the_weights_when_the_first_does_not(rendezvous: Rendezvous) -> None:
    first, second, third = (replace(rendezvous) for _ in range(3))
    assert first.claim_initialization()
    assert not second.claim_initialization()
    assert second.await_initialization(0.1), "the first has died"
    second.mark_initialized()
    assert not third.claim_initialization()
    assert not third.await_initialization(HANG_S)


def test_a_worker_with_another_learning_rate_or_version_is_refused(rendezvous: Rendezvous) -> None:
    def spec(**settings: float) -> ServerSpec:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})
        return ServerSpec.of(offbeat.ASP(), Replica(model, "local", optimizer), {"model": "Linear"}, HANG_S)

    def scheduled() -> ServerSpec:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] < 0.1
        return ServerSpec.of(offbeat.ASP(), Replica(model, "local", optimizer), {"model": "Linear"}, HANG_S)

    rendezvous.propose(spec())
    rendezvous.propose(scheduled())
    for other, words in [
        (spec(lr=1e3), "learning rate of group 1 is 1000 there, 0.1 on rank 0"),
        (spec(weight_decay=0.5), "settings of group 1 is .*'weight_decay': 0.5"),
        (replace(spec(), description={**spec().description, "server protocol": "1"}), "server protocol is 1"),
    ]:
        with pytest.raises(offbeat.MismatchError, match=words):
            rendezvous.propose(other)
