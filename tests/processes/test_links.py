"""Links and the shard behind them: real gloo, between threads where that will do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.worlds import links, serving
from offbeat.worlds.links import (
    HEADER,
    NEW,
    NOW,
    SERVER,
    WORKER,
    Kind,
    Link,
    challenge,
    finish,
    header,
    knock,
    prove,
)
from offbeat.worlds.serving import Post, Shard
from offbeat.worlds.way import Caller, Way
from tests.crew import Crew
from tests.unit.test_doors import conversation

TIMEOUT_S = 8.0
Start = Callable[..., Future[Any]]


@pytest.fixture
def start() -> Start:
    """Run something beside the test; its result is to be asked for."""

    def begin(function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as failed:
                future.set_exception(failed)

        Thread(target=work, daemon=True).start()  # a test that fails must not wait for it
        return future

    return begin


def ends(start: Start, store: dist.Store, prefix: str = "link") -> tuple[Link, Link]:
    other = start(Link, store, prefix, WORKER, TIMEOUT_S)
    return Link(store, prefix, SERVER, TIMEOUT_S), other.result(TIMEOUT_S)


# --- links


def test_headers_and_tensors_of_any_kind_come_through(start: Start) -> None:
    server, worker = ends(start, dist.HashStore())
    sent = [torch.randn(7), torch.randn(3).bfloat16(), torch.tensor([], dtype=torch.float64)]
    sent += [torch.arange(5, dtype=torch.float64), torch.tensor([0.1], dtype=torch.half)]
    works = worker.send(header(Kind.PUSH, 12, NOW), *sent)
    head, came = torch.zeros(HEADER, dtype=torch.int64), [torch.zeros_like(tensor) for tensor in sent]
    finish([*server.receive(head, *came), *works])
    assert head.tolist() == [Kind.PUSH, 12, NOW, 0]
    assert all(map(torch.equal, sent, came))


@pytest.mark.parametrize(("token", "right"), [(b"secret", True), (b"guess", False), (b"", False)])
def test_only_who_knows_the_token_proves_it(start: Start, token: bytes, right: bool) -> None:
    server, worker = ends(start, dist.HashStore())
    proved = start(prove, worker, token)
    assert challenge(server, b"secret") is right
    proved.result(TIMEOUT_S)


def test_a_closed_end_is_noticed_and_a_new_link_works(start: Start) -> None:
    store = dist.HashStore()
    server, worker = ends(start, store, "first")
    worker.close()
    with pytest.raises(RuntimeError):
        finish(server.receive(torch.zeros(1)))
    server.close()
    server, worker = ends(start, store, "second")
    works, came = worker.send(torch.ones(1)), torch.zeros(1)
    finish([*server.receive(came), *works])
    assert came == 1


def _three() -> str:
    """Rank 0 has a link to each of the others; rank 1 kills itself; ranks 0 and 2 go on, and make another."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank:
        link = Link(store, f"to/{rank}", WORKER, TIMEOUT_S)
        finish(link.send(torch.ones(1)))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["noticed"])
        finish(link.send(torch.ones(1)))
        finish(Link(store, "again", WORKER, TIMEOUT_S).send(torch.ones(1)))
        return "well"
    links = [Link(store, f"to/{other}", SERVER, TIMEOUT_S) for other in (1, 2)]
    for link in links:
        finish(link.receive(torch.zeros(1)))
    with pytest.raises(RuntimeError):
        finish(links[0].receive(torch.zeros(1)))
    store.set("noticed", "")
    finish(links[1].receive(torch.zeros(1)))
    finish(Link(store, "again", SERVER, TIMEOUT_S).receive(torch.zeros(1)))
    return "well"


def test_only_the_link_of_a_killed_worker_fails() -> None:
    crew = Crew(3)
    try:
        crew.start(_three)
        assert crew.outcomes([0, 2]) == [(True, "well")] * 2
    finally:
        crew.dismiss()


# --- a shard, in this process

SIZES = [("float32", 4), ("float64", 2)]


def post(folder: Path, workers: int = 1, strategy: str = "ssp", **settings: Any) -> Post:
    nowhere: Any = {"host": "", "port": 0, "prefix": "", "shard": 0, "parent": os.getppid()}
    served: Any = {
        "strategy": strategy,
        "settings": settings,
        "sizes": SIZES,
        "timeout_s": TIMEOUT_S,
        "optimizer": None,
    }
    kept: Any = {"snapshot": str(folder / "shard-0"), "snapshot_s": 1000.0}
    return Post(**nowhere, **served, **kept, workers=workers, neighbours=[0])


class Hand:
    """A worker, by hand."""

    def __init__(self, start: Start, shard: Shard, worker: int, clock: int | None = NEW) -> None:
        prefix = knock(shard.store, 0, worker)
        self.served = start(shard.admit, worker, prefix)
        self.link = Link(shard.store, prefix, WORKER, TIMEOUT_S)
        prove(self.link, b"secret")
        if clock is not None:
            self.welcome = self.ask(Kind.JOIN, clock)[0]

    def say(self, kind: int, *rest: Any) -> None:
        numbers = [n for n in rest if isinstance(n, int)]
        finish(self.link.send(header(kind, *numbers), *[t for t in rest if isinstance(t, Tensor)]))  # type: ignore[arg-type]

    def hear(self, *room: Tensor) -> list[int]:
        head = torch.zeros(HEADER, dtype=torch.int64)
        finish(self.link.receive(head, *room))
        numbers: list[int] = head.tolist()
        return numbers

    def ask(self, kind: Kind, *rest: Any) -> tuple[list[int], list[Tensor]]:
        """Say something, and hear the answer."""
        self.say(kind, *rest)
        weights = of(0.0) if kind is Kind.PULL else []
        return self.hear(*weights), weights

    def leave(self) -> None:
        self.say(Kind.LEAVE)
        self.served.result(TIMEOUT_S)

    def refused(self) -> bool:
        """The shard has closed the link."""
        self.served.result(TIMEOUT_S)
        with pytest.raises(RuntimeError):
            self.hear()
        return True


def of(value: float) -> list[Tensor]:
    return [torch.full((4,), value), torch.full((2,), value, dtype=torch.float64)]


def served(shard: Shard, hand: Hand, clock: int) -> bool:
    """Whether a good worker is served its next step."""
    before = [weight.clone() for weight in shard.server.weights]
    assert hand.ask(Kind.PUSH, clock, *of(0.5))[0] == [Kind.RECEIPT, clock, 0, 0]
    head, weights = hand.ask(Kind.PULL, clock)
    assert head[0] == Kind.WEIGHTS
    return all(torch.equal(new, old + 0.5) for new, old in zip(weights, before, strict=True))


def test_a_worker_is_served(start: Start, tmp_path: Path) -> None:
    shard = Shard(post(tmp_path, staleness=0), dist.HashStore(), b"secret")
    worker = Hand(start, shard, 0)
    assert worker.welcome == [Kind.WELCOME, 0, 0, 0], "there are no weights yet"
    assert worker.ask(Kind.OPEN, *of(1.0))[0] == [Kind.RECEIPT, 0, 0, 0]
    assert worker.ask(Kind.PUSH, 1, *of(0.5))[0] == [Kind.RECEIPT, 1, 0, 0]
    head, weights = worker.ask(Kind.PULL, 1)
    assert head == [Kind.WEIGHTS, 0, 0, 0]
    assert all(map(torch.equal, weights, of(1.5)))
    assert worker.ask(Kind.PUSH, 2, *of(float("nan")))[0] == [Kind.RECEIPT, 2, 1, 0], "it was refused"
    assert worker.ask(Kind.PUSH, 2, *of(0.5))[0] == [Kind.RECEIPT, 2, 0, 0], "sent again: not looked at"
    head, weights = worker.ask(Kind.PULL, NOW)
    assert head == [Kind.WEIGHTS, 0, 0, 0]
    assert all(map(torch.equal, weights, of(1.5)))
    worker.leave()
    assert not shard.doors and shard.finished


def test_a_stranger_is_told_at_once_what_to_look_at(start: Start, tmp_path: Path, caplog: Any) -> None:
    store = dist.HashStore()
    shard = Shard(post(tmp_path, strategy="asp"), store, b"secret")
    ran = start(shard.run)
    with pytest.raises(OffbeatError, match="shard 0 does not know this worker's token: check OFFBEAT_TOKEN"):
        Way(Caller(store, 5, b"guess", TIMEOUT_S), 0, "shard 0")
    assert caplog.text.count("refused a stranger who called itself worker 5") == 1, "it did not try again"
    assert not shard.doors and not shard.known
    Way(Caller(store, 0, b"secret", TIMEOUT_S), 0, "shard 0").leave()
    ran.result(TIMEOUT_S)


def test_bytes_that_leave_the_host_are_counted(start: Start, tmp_path: Path) -> None:
    shard = Shard(post(tmp_path, 2, "asp"), dist.HashStore(), b"secret")
    workers = [Hand(start, shard, worker) for worker in (0, 1)]
    workers[0].ask(Kind.OPEN, *of(0.0))
    for sent_away, worker in [(0, 0), (32, 1), (64, 1), (64, 0)]:
        assert workers[worker].ask(Kind.PULL, NOW)[0][2] == sent_away
    for worker in workers:
        worker.leave()


def test_one_who_was_long_let_wait_is_not_silent(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 is let on after a long wait; from then on, not from when it last spoke, it is its turn."""
    shard = Shard(post(tmp_path, 2, staleness=0), dist.HashStore(), b"secret")
    workers = [Hand(start, shard, worker) for worker in (0, 1)]
    workers[0].ask(Kind.OPEN, *of(0.0))
    for hand in workers:
        hand.ask(Kind.PUSH, 1, *of(1.0))
    workers[0].say(Kind.PULL, 1)
    with shard.changed:
        assert shard.changed.wait_for(lambda: shard.doors[0].waits, TIMEOUT_S)
        real = serving.time.monotonic
        monkeypatch.setattr(serving.time, "monotonic", lambda: real() + TIMEOUT_S / 2 - 1)
    workers[1].say(Kind.PULL, 1)
    for hand in workers:
        hand.hear(*of(0.0))
    with shard.changed:
        monkeypatch.setattr(serving.time, "monotonic", lambda: real() + TIMEOUT_S / 2 + 1)
        shard.forget_silent(waiting=1)
        assert sorted(shard.doors) == [0, 1]
    monkeypatch.undo()
    for hand in workers:
        hand.leave()


def test_one_who_knocks_and_comes_late_keeps_nobody_out(start: Start, tmp_path: Path) -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, theirs = (dist.TCPStore("127.0.0.1", master.port, is_master=False) for _ in range(2))
    shard = Shard(post(tmp_path, strategy="asp"), mine, b"secret")
    ran = start(shard.run)
    late = knock(theirs, 0, 7)
    Way(Caller(theirs, 0, b"secret", TIMEOUT_S), 0, "shard 0").leave()
    ran.result(TIMEOUT_S)
    prove(Link(theirs, late, WORKER, TIMEOUT_S), b"guess")


# --- who comes back


def test_a_door_knows_its_worker_came_back_through_another(start: Start, tmp_path: Path) -> None:
    shard = Shard(post(tmp_path, 2, "asp"), dist.HashStore(), b"secret")
    first = Hand(start, shard, 0)
    second = Hand(start, shard, 0)
    first.leave()
    assert 0 in shard.doors and shard.server.state.of == {0: 0}
    second.leave()
    assert not shard.doors


def test_one_who_comes_back_while_it_waits_gets_what_it_asks_for_now(start: Start, tmp_path: Path) -> None:
    """And the thread that waited on the old link ends."""
    shard = Shard(post(tmp_path, 2, staleness=0), dist.HashStore(), b"secret")
    old, other = (Hand(start, shard, worker) for worker in (0, 1))
    old.ask(Kind.OPEN, *of(0.0))
    old.ask(Kind.PUSH, 1, *of(1.0))
    old.say(Kind.PULL, 1)
    with shard.changed:
        assert shard.changed.wait_for(lambda: shard.doors[0].waits, TIMEOUT_S)
    new = Hand(start, shard, 0, 1)
    old.served.result(TIMEOUT_S)
    assert new.welcome == [Kind.WELCOME, 1, 0, 1]
    other.ask(Kind.PUSH, 1, *of(1.0))
    other.ask(Kind.PULL, 1)
    new.ask(Kind.PULL, 1)
    new.say(Kind.PUSH, 2, *of(1.0))
    assert new.hear() == [Kind.RECEIPT, 2, 0, 0]
    new.say(Kind.PULL, 2)
    other.ask(Kind.PUSH, 2, *of(1.0))
    other.say(Kind.PULL, 2)
    for hand in (new, other):
        weights = of(0.0)
        assert hand.hear(*weights)[:2] == [Kind.WEIGHTS, 0]
        assert all(map(torch.equal, weights, of(4.0))), "with all pushes, its own included"
        hand.leave()


def test_a_shard_that_is_started_again_says_what_is_lost(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = Shard(post(tmp_path, strategy="asp"), dist.HashStore(), b"secret")
    hand = Hand(start, shard, 0)
    hand.ask(Kind.OPEN, *of(0.0))
    for clock in (1, 2):
        assert served(shard, hand, clock)
    shard.snapshots.write(shard._take)
    for clock in (3, 4, 5):
        assert served(shard, hand, clock)
    hand.link.close()
    again = Shard(post(tmp_path, strategy="asp"), dist.HashStore(), b"secret")
    assert "starts again from its snapshot" in caplog.text
    back = Hand(start, again, 0, 5)
    assert back.welcome == [Kind.WELCOME, 5, 3, 1]
    assert "3 updates of worker 0 since the last snapshot are lost" in caplog.text
    assert served(again, back, 6)
    assert all(map(torch.equal, again.server.weights, of(1.5))), "pushes 1, 2 and 6"
    back.leave()


def test_weights_that_are_given_anew_are_kept_before_that_is_acknowledged(
    start: Start, tmp_path: Path
) -> None:
    """The snapshot of before counts by other clocks: new pushes would be taken for old ones."""
    shard = Shard(post(tmp_path, strategy="asp"), dist.HashStore(), b"secret")
    hand = Hand(start, shard, 0)
    hand.ask(Kind.OPEN, *of(0.0))
    for clock in (1, 2, 3):
        assert served(shard, hand, clock)
    shard.snapshots.write(shard._take)
    assert hand.ask(Kind.OPEN, *of(7.0))[0] == [Kind.RECEIPT, 0, 0, 0]
    kept = shard.snapshots.read()
    assert kept is not None and kept.applied == {0: 0}
    assert all(map(torch.equal, kept.weights, of(7.0)))
    assert served(shard, hand, 1), "clocks begin again"
    hand.leave()


# --- what is not of the protocol

MALFORMED: dict[str, tuple[list[Any], str]] = {
    "an unknown kind": ([17, 0], "a header of kind 17"),
    "a kind of servers": ([Kind.WEIGHTS, 0], "a header of kind 7"),
    "a push without a clock": ([Kind.PUSH, 0], "PUSH with the numbers 0, 0, 0"),
    "a negative clock": ([Kind.PULL, -2], "PULL with the numbers -2, 0, 0"),
    "a negative time": ([Kind.PUSH, 1, -1], "PUSH with the numbers 1, -1, 0"),
    "too large a number": ([Kind.PULL, 1 << 60], "PULL with the numbers"),
    "more than belongs there": ([Kind.PULL, 1, 0, 5], "PULL with the numbers 1, 0, 5"),
    "joining twice": ([Kind.JOIN, NEW], "JOIN twice"),
    "a push too far": ([Kind.PUSH, 9, *of(1.0)], "push 9 before those that go before it"),
    "bad weights to start with": ([Kind.OPEN, *of(float("inf"))], "weights that are not finite"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_ends_its_own_link_only(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    shard = Shard(post(tmp_path, 2, "asp"), dist.HashStore(), b"secret")
    good, bad = (Hand(start, shard, worker) for worker in (0, 1))
    good.ask(Kind.OPEN, *of(0.0))
    assert served(shard, bad, 1)
    message, words = MALFORMED[what]
    bad.say(*message)
    assert bad.refused()
    assert f"refused worker 1: it sent {words}" in caplog.text
    assert served(shard, good, 1)
    assert sorted(shard.doors) == [0] and shard.server.state.of == {0: 1}
    back = Hand(start, shard, 1, 1)
    assert served(shard, back, 2), "it may come back and do better"
    for hand in (good, back):
        hand.leave()


@pytest.mark.parametrize("kind", [Kind.OPEN, Kind.PUSH, Kind.PULL, Kind.LEAVE])
def test_joining_comes_first(start: Start, tmp_path: Path, caplog: Any, kind: Kind) -> None:
    shard = Shard(post(tmp_path, strategy="asp"), dist.HashStore(), b"secret")
    hasty = Hand(start, shard, 0, clock=None)
    hasty.say(kind, 1)
    assert hasty.refused()
    assert f"it sent {kind.name} before JOIN" in caplog.text
    assert not shard.known and not shard.doors


def test_who_knocks_with_no_number_is_passed_over(start: Start, tmp_path: Path) -> None:
    store = dist.HashStore()
    shard = Shard(post(tmp_path, strategy="asp"), store, b"secret")
    for nonsense in (";", "5;", "-1:ab;", "one:ab;", f"{'9' * 40}:ab;", "5:;", "5:../ab;", ":;:;"):
        store.append("knocks/0", nonsense)
    ran = start(shard.run)
    way = Way(Caller(store, 3, b"secret", TIMEOUT_S), 0, "shard 0")
    assert list(shard.doors) == [3]
    way.leave()
    ran.result(TIMEOUT_S)


def test_a_siege_over_real_links(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some hundreds of malformed conversations, while a good worker is served."""
    shard = Shard(post(tmp_path, strategy="asp"), dist.HashStore(), b"secret")
    good, random, refused = Hand(start, shard, 0), Random(3), 0
    good.ask(Kind.OPEN, *of(0.0))
    while refused < 200:
        said, bad = conversation(random)
        besieger = Hand(start, shard, 1 + refused % 3, clock=None)
        works: list[Any] = []
        for part in said:
            if isinstance(part, Tensor):
                rooms = iter(of(0.0))
                answer = [torch.zeros_like(part), *(of(0.0) if part[0] == Kind.PULL else [])]
                works += besieger.link.receive(*answer) + besieger.link.send(part)
            else:
                works += besieger.link.send(next(rooms).fill_(part))
        if not bad:
            works[-1].wait()
            works.clear()  # they, too, hold the connection
            besieger.link.close()
        besieger.served.result(TIMEOUT_S)
        assert caplog.text.count("it sent") == bad
        caplog.clear()
        refused += bad
        if refused % 20 == 0:
            shard.fill(of(0.0))
            assert good.ask(Kind.PUSH, 1, *of(0.5))[0] == [Kind.RECEIPT, 1, 0, 0]
            assert all(map(torch.equal, good.ask(Kind.PULL, NOW)[1], of(0.5)))
            assert list(shard.doors) == [0]
    good.leave()


def test_pieces_are_cut_at_the_same_places(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PIECE_BYTES", 64)
    server, worker = ends(start, dist.HashStore())
    sent = [torch.randn(100), torch.randn(33, dtype=torch.float64), torch.zeros(0), torch.randn(16)]
    assert [piece.nbytes for piece in links.pieces(sent)] == [64] * 6 + [16] + [64] * 4 + [8] + [64]
    works, came = worker.send(*sent), [torch.zeros_like(tensor) for tensor in sent]
    finish([*server.receive(*came), *works])
    assert all(map(torch.equal, sent, came))
