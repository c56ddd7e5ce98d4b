"""Links and the shard behind them: real gloo, between threads where that will do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.worlds import serving
from offbeat.worlds.links import (
    HEADER,
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
from tests.crew import Crew

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


def post(workers: int = 1, strategy: str = "ssp", **settings: Any) -> Post:
    sizes = [("float32", 4), ("float64", 2)]
    nowhere: Any = {"host": "", "port": 0, "prefix": "", "shard": 0}
    served: Any = {"strategy": strategy, "settings": settings, "sizes": sizes, "timeout_s": TIMEOUT_S}
    return Post(**nowhere, **served, parent=os.getppid(), workers=workers, neighbours=[0])


class Caller:
    """A worker, by hand."""

    def __init__(self, start: Start, shard: Shard, worker: int, token: bytes = b"secret") -> None:
        store = shard.store
        prefix = knock(store, 0, worker)
        self.served = start(shard.admit, worker, prefix)
        self.link = Link(store, prefix, WORKER, TIMEOUT_S)
        prove(self.link, token)

    def say(self, kind: Kind, *rest: Any) -> None:
        numbers = [n for n in rest if isinstance(n, int)]
        finish(self.link.send(header(kind, *numbers), *[t for t in rest if isinstance(t, Tensor)]))

    def hear(self) -> tuple[list[int], list[Tensor]]:
        head, weights = torch.zeros(HEADER, dtype=torch.int64), post().buffers()
        finish(self.link.receive(head, *weights))
        return head.tolist(), weights

    def leave(self) -> None:
        self.say(Kind.LEAVE)
        self.served.result(TIMEOUT_S)


def of(value: float) -> list[Tensor]:
    return [torch.full((4,), value), torch.full((2,), value, dtype=torch.float64)]


def test_a_stranger_is_refused_and_a_worker_is_served(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    shard = Shard(post(staleness=0), dist.HashStore(), b"secret")
    stranger = Caller(start, shard, 5, b"guess")
    stranger.served.result(TIMEOUT_S)
    assert "refused a stranger who called itself worker 5" in caplog.text
    assert not shard.doors and not shard.complete
    worker = Caller(start, shard, 0)
    worker.say(Kind.OPEN, *of(1.0))
    worker.say(Kind.PUSH, 1, *of(0.5))
    worker.say(Kind.PULL, 1)
    head, weights = worker.hear()
    assert head == [Kind.WEIGHTS, 0, 0, 0]
    assert all(map(torch.equal, weights, of(1.5)))
    worker.say(Kind.PUSH, 2, *of(float("nan")))
    worker.say(Kind.PULL, NOW)
    head, weights = worker.hear()
    assert head == [Kind.WEIGHTS, 0, 0, 1], "one was refused"
    assert all(map(torch.equal, weights, of(1.5)))
    worker.leave()
    assert not shard.doors


def test_bytes_that_leave_the_host_are_counted(start: Start) -> None:
    shard = Shard(post(2, "asp"), dist.HashStore(), b"secret")
    workers = [Caller(start, shard, worker) for worker in (0, 1)]
    workers[0].say(Kind.OPEN, *of(0.0))
    for sent_away, worker in [(0, 0), (32, 1), (64, 1), (64, 0)]:
        workers[worker].say(Kind.PULL, NOW)
        assert workers[worker].hear()[0][2] == sent_away
    for worker in workers:
        worker.leave()


def test_one_who_was_long_let_wait_is_not_silent(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 is let on after a long wait; from then on, not from when it last spoke, it is its turn."""
    shard = Shard(post(2, staleness=0), dist.HashStore(), b"secret")
    workers = [Caller(start, shard, worker) for worker in (0, 1)]
    workers[0].say(Kind.OPEN, *of(0.0))
    for caller in workers:
        caller.say(Kind.PUSH, 1, *of(1.0))
    workers[0].say(Kind.PULL, 1)
    with shard.changed:
        assert shard.changed.wait_for(lambda: shard.doors[0].waits, TIMEOUT_S)
        real = serving.time.monotonic
        monkeypatch.setattr(serving.time, "monotonic", lambda: real() + TIMEOUT_S / 2 - 1)
    workers[1].say(Kind.PULL, 1)
    for caller in workers:
        caller.hear()
    with shard.changed:
        monkeypatch.setattr(serving.time, "monotonic", lambda: real() + TIMEOUT_S / 2 + 1)
        shard.forget_silent(waiting=1)
        assert sorted(shard.doors) == [0, 1]
    monkeypatch.undo()
    for caller in workers:
        caller.leave()


def test_one_who_knocks_and_comes_late_keeps_nobody_out(start: Start) -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, theirs = (dist.TCPStore("127.0.0.1", master.port, is_master=False) for _ in range(2))
    shard = Shard(post(strategy="asp"), mine, b"secret")
    ran = start(shard.run)
    prefixes = [knock(theirs, 0, worker) for worker in (7, 0)]
    link = Link(theirs, prefixes[1], WORKER, TIMEOUT_S)
    prove(link, b"secret")
    finish(link.send(header(Kind.LEAVE)))
    ran.result(TIMEOUT_S)
    prove(Link(theirs, prefixes[0], WORKER, TIMEOUT_S), b"guess")


def test_a_door_knows_its_worker_came_back_through_another(start: Start) -> None:
    shard = Shard(post(2, "asp"), dist.HashStore(), b"secret")
    first = Caller(start, shard, 0)
    with shard.changed:
        assert shard.changed.wait_for(lambda: 0 in shard.doors, TIMEOUT_S)
        old = shard.doors[0]
    second = Caller(start, shard, 0)
    with shard.changed:
        assert shard.changed.wait_for(lambda: shard.doors[0] is not old, TIMEOUT_S)
    first.leave()
    assert 0 in shard.doors and shard.server.state.of == {0: 0}
    second.leave()
    assert not shard.doors
