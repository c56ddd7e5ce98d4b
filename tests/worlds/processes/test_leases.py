"""Leases on batches: what a dead worker has left goes to one other, what a living one has to none."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.worlds.processes.leases import Batch, Leases
from offbeat.worlds.processes.store import DeadlineStore

LEASE_S = 1e6  # no thread beats while a test runs: a worker lives as long as a test lets it beat
PER_EPOCH = 6


class Stage:
    """Workers with one store and one clock, which only the test moves."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.store = DeadlineStore(dist.HashStore())
        self.workers = {name: self.worker(name) for name in names}

    def worker(self, name: str) -> Leases:
        return Leases(self.store, name, PER_EPOCH, LEASE_S, lambda: self.now)

    def pass_lease(self, *alive: str) -> None:
        for name in alive:
            self.store.add(f"beat/{name}", 1)
        self.now += LEASE_S


def test_an_epoch_is_claimed_in_order_by_whoever_asks() -> None:
    stage = Stage("a", "b")
    a, b = stage.workers.values()
    assert [a.claim(0), b.claim(0), a.claim(0), b.claim(1), b.claim(0)] == [0, 1, 2, 0, 3]


def test_what_a_dead_worker_held_goes_to_one_other() -> None:
    stage = Stage("a", "b", "c")
    a, b, c = stage.workers.values()
    for _ in range(2):
        a.claim(0)
    a.done(Batch(0, 0))
    b.claim(0)
    assert b.look(1).orphans == c.look(1).orphans == [], "all were heard of just now"
    stage.pass_lease("b", "c")
    assert b.look(1) == c.look(1) == ([Batch(0, 1)], {Batch(0, 2): "b"})
    assert [c.adopt(Batch(0, 1)), b.adopt(Batch(0, 1))] == [True, False]
    assert b.look(1) == ([], {Batch(0, 1): "c", Batch(0, 2): "b"}), "although the dead one held it, too"
    c.done(Batch(0, 1))
    b.done(Batch(0, 2))
    assert b.look(1) == ([], {})


def test_an_orphan_is_adopted_again_when_its_new_worker_dies() -> None:
    stage = Stage("a", "b", "c")
    a, b, c = stage.workers.values()
    a.claim(0)
    b.look(1)
    stage.pass_lease("b", "c")
    assert b.look(1).orphans == [Batch(0, 0)]
    assert b.adopt(Batch(0, 0))
    assert c.look(1).held == {Batch(0, 0): "b"}
    stage.pass_lease("c")
    assert c.look(1).orphans == [Batch(0, 0)]
    assert c.adopt(Batch(0, 0))


def test_a_claim_that_was_never_written_is_lost_after_a_lease() -> None:
    """Its worker died in between, or the counter was counted twice."""
    stage = Stage("a")
    (a,) = stage.workers.values()
    stage.store.add("next/0", 1)
    assert a.look(1) == ([], {Batch(0, 0): ""}), "its worker may be about to write it"
    stage.pass_lease("a")
    assert a.look(1).orphans == [Batch(0, 0)]


def test_a_worker_that_gives_its_batches_up_leaves_them() -> None:
    stage = Stage("a", "b")
    a, b = stage.workers.values()
    for _ in range(3):
        a.claim(0)
    a.keep_only([Batch(0, 1)])
    b.look(1)
    stage.pass_lease("a", "b")
    assert b.look(1) == ([Batch(0, 0), Batch(0, 2)], {Batch(0, 1): "a"})


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 2))
def test_whoever_dies_each_batch_is_done_once(data: st.DataObject, epochs: int) -> None:
    """Deaths come between any two steps, and at any point of them; the last one alive ends the work."""
    stage = Stage("0", "1", "2")
    alive = dict(stage.workers)
    trained: list[Batch] = []
    holding: dict[str, Batch | None] = dict.fromkeys(alive)
    for _ in range(400):
        name = data.draw(st.sampled_from(sorted(alive)))
        me, batch = alive[name], holding[name]
        if len(alive) > 1 and data.draw(st.integers(0, 9)) == 0:
            del alive[name]
            continue
        if batch is not None:
            trained.append(batch)
            me.done(batch)
            holding[name] = None
            continue
        number = next((Batch(e, n) for e in range(epochs) if (n := me.claim(e)) < PER_EPOCH), None)
        if number is None:
            orphans, held = me.look(epochs)
            number = next((orphan for orphan in orphans if me.adopt(orphan)), None)
            if number is None and not held:
                break
            stage.pass_lease(*alive)
        holding[name] = number
    else:
        pytest.fail("the work does not end")
    assert sorted(trained) == [Batch(e, n) for e in range(epochs) for n in range(PER_EPOCH)]
