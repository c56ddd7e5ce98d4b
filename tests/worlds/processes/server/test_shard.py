"""A shard and its doors, by real links from workers that a test plays by hand."""

from __future__ import annotations

import math
import re
import socket
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbeat import SSP
from offbeat.core.pending import block_on
from offbeat.errors import OffbeatError, RankLost
from offbeat.server.messages import Pull, PullReply
from offbeat.worlds.processes.ledger import SharedLedger
from offbeat.worlds.processes.server import newcomers
from offbeat.worlds.processes.server import shard as serving
from offbeat.worlds.processes.server.attendance import RETURN_S
from offbeat.worlds.processes.server.auth import sign
from offbeat.worlds.processes.server.channel import ClientIdentity, Request, ShardChannel
from offbeat.worlds.processes.server.discovery import resolve
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.transport import ProcessServerClient, TcpTransport
from offbeat.worlds.processes.server.wire import HEADER, NOBODY, NOW, MessageType, encode_header
from tests.support import beside
from tests.support.limits import HANG_S
from tests.support.shards import Hand, of, served, shard_of, way_to
from tests.support.waiting import until

pytestmark = pytest.mark.processes


def test_a_worker_is_served(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, "ssp", staleness=0)
    worker = Hand(shard, 0)
    assert worker.welcome == [MessageType.JOIN_ACK, 0, 0, 0], "there are no weights yet"
    assert worker.ask(MessageType.LOAD, *of(1.0))[0] == [MessageType.PUSH_ACK, 0, 0, 0]
    assert worker.ask(MessageType.PUSH, 1, *of(0.5))[0] == [MessageType.PUSH_ACK, 1, 0, 0]
    head, weights = worker.ask(MessageType.PULL, 1)
    assert head == [MessageType.PULL_REPLY, 0, 0, 0]
    assert all(map(torch.equal, weights, of(1.5)))
    assert worker.ask(MessageType.PUSH, 2, *of(float("nan")))[0] == [MessageType.PUSH_ACK, 2, 1, 0], (
        "it was refused"
    )
    assert worker.ask(MessageType.PUSH, 2, *of(0.5))[0] == [MessageType.PUSH_ACK, 2, 0, 0], (
        "sent again: not looked at"
    )
    head, weights = worker.ask(MessageType.PULL, NOW)
    assert head == [MessageType.PULL_REPLY, 0, 0, 0]
    assert all(map(torch.equal, weights, of(1.5)))
    worker.leave()
    assert not shard.sessions and shard.finished


def test_a_stranger_is_told_at_once_what_to_look_at(tmp_path: Path, caplog: Any) -> None:
    shard = shard_of(tmp_path)
    ran = beside.beside(shard.run)
    with pytest.raises(OffbeatError, match="'address/0' in the store is not signed with this token: check"):
        way_to(shard, 5, b"guess")
    until(lambda: shard.store.check(["address/0"]))
    known = resolve(shard.store, b"secret", 0, "127.0.0.1")
    assert known is not None
    store = dist.HashStore()  # one who knows the address by other means
    store.set("address/0", sign(b"guess", "address/0", f"plain {known.tcp_port} "))
    with pytest.raises(OffbeatError, match="shard 0 does not know this worker's token: check OFFBEAT_TOKEN"):
        ShardChannel(ClientIdentity(store, "127.0.0.1", 5, b"guess", HANG_S), 0, "shard 0")
    until(lambda: "refused a connection with another token" in caplog.text)
    assert not shard.sessions and not shard.attendance.joined
    way_to(shard, 0).leave()
    ran.result(HANG_S)
    assert caplog.text.count("refused a connection with another token") == 1, "it did not try again"


def test_bytes_that_leave_the_host_are_counted(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, workers=2)
    workers = [Hand(shard, worker) for worker in (0, 1)]
    workers[0].ask(MessageType.LOAD, *of(0.0))
    for sent_away, worker in [(0, 0), (32, 1), (64, 1), (64, 0)]:
        assert workers[worker].ask(MessageType.PULL, NOW)[0][2] == sent_away
    for worker in workers:
        worker.leave()


def test_one_who_was_long_let_wait_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 is let on after a long wait; from then on, not from when it last spoke, it is its turn."""
    now_s = [1000.0]
    monkeypatch.setattr(serving.time, "monotonic", lambda: now_s[0])  # nothing passes but what is said here
    shard = shard_of(tmp_path, "ssp", workers=2, staleness=0)
    workers = [Hand(shard, worker) for worker in (0, 1)]
    workers[0].ask(MessageType.LOAD, *of(0.0))
    for hand in workers:
        hand.ask(MessageType.PUSH, 1, *of(1.0))
    workers[0].say(MessageType.PULL, 1)
    with shard.changed:
        assert shard.changed.wait_for(lambda: shard.sessions[0].waits, HANG_S)
        now_s[0] += shard.config.silence_s - 1
    workers[1].say(MessageType.PULL, 1)
    for hand in workers:
        hand.hear(*of(0.0))
    with shard.changed:
        now_s[0] += 2
        shard.remove_silent(waiting=1)
        assert sorted(shard.sessions) == [0, 1]
    for hand in workers:
        hand.leave()


def test_one_who_comes_and_says_nothing_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_of(tmp_path)
    ran = beside.beside(shard.run)
    way = way_to(shard, 0)
    monkeypatch.setattr(newcomers, "JOIN_TIMEOUT_S", 0.1)  # from here on, for one who certainly says nothing
    address = resolve(shard.store, b"secret", 0, "127.0.0.1")
    assert address is not None
    with socket.create_connection(address.endpoint, timeout=HANG_S) as mute:
        while mute.recv(64):
            pass  # until the shard has had enough of it
    assert list(shard.sessions) == [0]
    way.leave()
    ran.result(HANG_S)


# --- who comes back


def test_a_door_knows_its_worker_came_back_through_another(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, workers=2)
    first = Hand(shard, 0)
    second = Hand(shard, 0)
    assert first.refused(), "its link was ended"
    assert 0 in shard.sessions and shard.server.state.of == {0: 0}
    second.leave()
    assert not shard.sessions


def test_one_who_comes_back_while_it_waits_gets_what_it_asks_for_now(tmp_path: Path) -> None:
    """And the thread that waited on the old link ends."""
    shard = shard_of(tmp_path, "ssp", workers=2, staleness=0)
    old, other = (Hand(shard, worker) for worker in (0, 1))
    old.ask(MessageType.LOAD, *of(0.0))
    old.ask(MessageType.PUSH, 1, *of(1.0))
    old.say(MessageType.PULL, 1)
    with shard.changed:
        assert shard.changed.wait_for(lambda: shard.sessions[0].waits, HANG_S)
    new = Hand(shard, 0, 1)
    assert old.refused()
    assert new.welcome == [MessageType.JOIN_ACK, 1, 0, 1]
    other.ask(MessageType.PUSH, 1, *of(1.0))
    other.ask(MessageType.PULL, 1)
    new.ask(MessageType.PULL, 1)
    new.say(MessageType.PUSH, 2, *of(1.0))
    assert new.hear() == [MessageType.PUSH_ACK, 2, 0, 0]
    new.say(MessageType.PULL, 2)
    other.ask(MessageType.PUSH, 2, *of(1.0))
    other.say(MessageType.PULL, 2)
    for hand in (new, other):
        weights = of(0.0)
        assert hand.hear(*weights)[:2] == [MessageType.PULL_REPLY, 0]
        assert all(map(torch.equal, weights, of(4.0))), "with all pushes, its own included"
        hand.leave()


def test_a_shard_does_not_end_while_a_worker_is_about_to_return(tmp_path: Path) -> None:
    """The connection of one breaks, and before it is back the other leaves: there is one who trains on."""
    shard = shard_of(tmp_path, workers=2)
    torn, other = (Hand(shard, worker) for worker in (0, 1))
    torn.link.close()
    torn.served.result(HANG_S)
    other.leave()
    assert shard.finished and not shard._may_end()
    shard.attendance._left_s[0] -= RETURN_S
    assert shard._may_end(), "it does not come back"


def test_a_shard_that_is_started_again_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = shard_of(tmp_path)
    hand = Hand(shard, 0)
    hand.ask(MessageType.LOAD, *of(0.0))
    for clock in (1, 2):
        assert served(shard, hand, clock)
    shard.snapshots.write(shard._copy_state)
    for clock in (3, 4, 5):
        assert served(shard, hand, clock)
    hand.link.close()
    again = shard_of(tmp_path)
    assert "starts again from its snapshot" in caplog.text
    for worker, lost in ((0, 3), (1, 2)):  # of another worker, whose pushes came after the snapshot
        question = Hand(again, worker, None)
        assert question.ask(MessageType.COUNT, worker, 5, 2)[0] == [MessageType.JOIN_ACK, 5, lost, 1]
        question.served.result(HANG_S)
        question.link.close()
    assert not again.sessions, "one who asks has not joined"
    back = Hand(again, 0, 5)
    assert back.welcome == [MessageType.JOIN_ACK, 5, 3, 1]
    assert "3 updates of worker 0 since the last snapshot are lost" in caplog.text
    assert served(again, back, 6)
    assert all(map(torch.equal, again.server.weights, of(1.5))), "pushes 1, 2 and 6"
    back.leave()


def test_weights_that_are_given_anew_are_kept_before_that_is_acknowledged(tmp_path: Path) -> None:
    """The snapshot of before counts by other clocks: new pushes would be taken for old ones."""
    shard = shard_of(tmp_path)
    hand = Hand(shard, 0)
    hand.ask(MessageType.LOAD, *of(0.0))
    for clock in (1, 2, 3):
        assert served(shard, hand, clock)
    shard.snapshots.write(shard._copy_state)
    assert hand.ask(MessageType.LOAD, *of(7.0))[0] == [MessageType.PUSH_ACK, 0, 0, 0]
    kept = shard.snapshots.read()
    assert kept is not None and kept.applied == {0: 0}
    assert all(map(torch.equal, kept.weights, of(7.0)))
    assert served(shard, hand, 1), "clocks begin again"
    hand.leave()


def test_initial_weights_do_not_replace_those_that_another_worker_brought(tmp_path: Path) -> None:
    """Two workers may bring them, if one was taken for dead; training must not begin anew."""
    shard = shard_of(tmp_path)
    hand = Hand(shard, 0)
    hand.ask(MessageType.LOAD, 0, 1, *of(1.0))
    assert served(shard, hand, 1)
    assert hand.ask(MessageType.LOAD, 0, 1, *of(7.0))[0] == [MessageType.PUSH_ACK, 0, 0, 0]
    assert all(map(torch.equal, shard.server.weights, of(1.5)))
    hand.leave()


# --- who waits, and for whom


def test_a_worker_that_dies_while_it_waits_is_removed_at_once(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, "ssp", workers=2, staleness=0)
    ran = beside.beside(shard.run)
    waiting, other = (Hand(shard, worker) for worker in (0, 1))
    waiting.ask(MessageType.LOAD, *of(0.0))
    waiting.ask(MessageType.PUSH, 1, *of(1.0))
    waiting.say(MessageType.PULL, 1)
    with shard.changed:
        assert shard.changed.wait_for(lambda: shard.sessions[0].waits, HANG_S)
    waiting.say(MessageType.PUSH, 2, *of(1.0))  # more to read, before the end
    waiting.link.close()
    waiting.served.result(HANG_S)
    assert list(shard.sessions) == [1]
    assert shard.server.state.of == {1: 0}
    other.leave()
    ran.result(HANG_S)


def test_a_waiting_worker_is_told_whom_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CHECK_S", 0.01)
    shard = shard_of(tmp_path, "ssp", workers=3, staleness=0)
    ran = beside.beside(shard.run)
    channels = [way_to(shard, worker) for worker in (0, 1)]
    head = [torch.zeros(HEADER, dtype=torch.int64)]
    load = channels[0].start(Request([encode_header(MessageType.LOAD), *of(0.0)], head))
    assert channels[0].finish(load, monotonic() + HANG_S) is None
    pull = Request([encode_header(MessageType.PULL, 1)], [head[0].clone(), *of(0.0)])
    channels[0].start(pull)
    until(lambda: pull.waits_for == (NOBODY, 0, 2))
    assert str(channels[0].finish(pull, 0.0)) == f"only 2 workers have joined shard 0 within {HANG_S:.0f} s"
    channels.append(way_to(shard, 2))
    until(lambda: pull.waits_for is not None and pull.waits_for[0] in (1, 2))
    named = pull.waits_for[0]  # type: ignore[index]
    told = channels[0].finish(pull, 0.0)
    assert isinstance(told, RankLost)
    assert re.match(rf"worker {named} has not pushed for \d+ s, and shard 0 waits for it", str(told))
    for channel in channels:
        channel.leave()
    ran.result(HANG_S)


# --- who was away for long


def test_one_who_was_forgotten_is_fenced_at_all_shards(tmp_path: Path, caplog: Any) -> None:
    """Shard 0 has removed worker 1 as silent, shard 1 has not: the worker is a newcomer at both."""
    store, shards, ran = dist.HashStore(), [], []
    for number in (0, 1):
        told = beside.post(tmp_path / str(number), [("float32", 2)], "ssp", workers=2, staleness=1)
        shards.append(ShardServer(replace(told, shard=number), store, b"secret"))
        ran.append(beside.beside(shards[-1].run))
    clients = []
    for worker in (0, 1):
        ledger = SharedLedger(worker, monotonic)
        ledger.start()
        identity = ClientIdentity(store, "127.0.0.1", worker, b"secret", HANG_S)
        transport = TcpTransport(identity, ["shard 0", "shard 1"], [torch.zeros(4)], ledger)
        half = SSP(staleness=1).server_half()
        clients.append(ProcessServerClient(transport, half, world=2, weights=[torch.zeros(4)], state_parts=0))
    block_on(clients[0].load([torch.zeros(4)]))

    def step(worker: int, clock: int) -> tuple[bool, list[float]]:
        into = torch.zeros(4)
        pushed = clients[worker].push([torch.ones(4)], clock)
        pulled = clients[worker].pull([into], clock)
        pulled.wait()
        pushed.wait()
        return pushed.result(), into.tolist()

    assert [step(worker, 1) for worker in (0, 1)] == [(True, [1.0] * 4), (True, [2.0] * 4)]
    with shards[0].changed:
        shards[0].sessions[1].heard_s = -math.inf
        shards[0].remove_silent(waiting=0)
    with shards[1].changed:  # here its connection broke a moment ago
        shards[1]._remove(1, announced=False)
    for clock in range(2, 10):
        assert step(0, clock)[0]
    assert step(1, 2) == (False, [10.0, 10.0, 11.0, 11.0]), "dropped by the shard that had forgotten it"
    assert [list(shard.server.state.of.items()) for shard in shards] == [[(0, 9), (1, 9)]] * 2
    assert "it continues with fresh weights, and its last update is dropped" in caplog.text
    assert step(0, 10)[0], "nobody waits until it has caught up"
    assert step(1, 3) == (True, [12.0, 12.0, 13.0, 13.0])
    assert [channel.clock for channel in clients[1].transport.channels] == [10, 10]
    for client in clients:
        client.leave()
    for each in ran:
        each.result(HANG_S)


def test_one_who_was_forgotten_by_a_server_without_weights_is_told(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, "osp", workers=1, on="server")
    ran = beside.beside(shard.run)
    way = way_to(shard, 0)
    with shard.changed:
        shard._remove(0, announced=False)
        shard.attendance.lose(0, silent=True)
    with pytest.raises(RankLost, match="the others have trained on without it, and shard 0 has no weights"):
        way._open(monotonic() + HANG_S)
    shard.finished = True
    ran.result(HANG_S)


def test_an_answer_tells_the_bytes_of_its_own_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the later one at which the thread of its session gets the processor. Worker 0 is on its host."""

    class Answered:
        worker = 0
        remote_bytes = 0

        def answer(self, answer: PullReply) -> int:
            return 100

    shard = shard_of(tmp_path, "ssp")
    shard.sessions = {worker: Answered() for worker in range(3)}  # type: ignore[misc]
    first, second = ([PullReply(worker=worker, staleness=0) for worker in some] for some in ([0, 1], [2]))
    for answers in (first, second):
        monkeypatch.setattr(shard.server, "handle", lambda _, answers=answers: answers)
        with shard.changed:
            shard.dispatch(Pull(worker=0, clock=None))
    assert [shard.sessions[worker].remote_bytes for worker in range(3)] == [100, 100, 200]
