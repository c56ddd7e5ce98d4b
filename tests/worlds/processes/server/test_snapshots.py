"""Snapshots: whenever the process is killed there is a whole one; what is damaged or not ours is refused."""

from __future__ import annotations

import multiprocessing as mp
import os
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbeat.errors import OffbeatError
from offbeat.server.messages import Join, Push
from offbeat.server.optimizer_spec import OptimizerSpec
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server import snapshot_file, snapshots
from offbeat.worlds.processes.server.channel import ClientIdentity, ShardChannel
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.snapshots import Snapshots
from tests.support import beside
from tests.support.conversations import SIZES
from tests.support.limits import HANG_S
from tests.support.shards import pushed, serving_one, shard_config
from tests.support.small_disk import small_disk as small_disk

# --- killed in the middle


MOMENTS = ["anywhere", "half of it is written", "it is not in place yet"]


def write_forever(path: Path, told: Connection, moment: str, at: int) -> None:
    """Write 1, 2, 3 … into all of the weights and into the clock, and tell of each that is written.

    The one number `at` comes no further than to its `moment`.
    """
    whole, real_fsync = snapshot_file._bytes_of, os.fsync

    def half(state: ShardState) -> Any:
        first = next(iter(whole(state)))
        yield first[: len(first) // 2]
        stay()

    def stay(*_: Any) -> None:
        told.send(clock - 1)
        Event().wait()

    weights, clock = [torch.zeros(300_000), torch.zeros(1000, dtype=torch.float64)], 0
    shots = Snapshots(path, 1000.0)

    def take(copy: ShardState) -> None:
        copy.weights = [weight.clone() for weight in weights]
        copy.applied = {0: clock, 1: 2 * clock}

    while True:
        clock += 1
        if clock == at:
            snapshot_file._bytes_of = half if moment == MOMENTS[1] else whole
            os.fsync = stay if moment == MOMENTS[2] else real_fsync
        for weight in weights:
            weight.fill_(clock)
        shots.write(take)
        told.send(clock)


def test_whenever_it_is_killed_the_last_whole_one_is_there(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.worlds.processes.server.test_snapshots"])
    random, unfinished = Random(0), 0
    for life in range(20):
        moment, writes = MOMENTS[life % 3], random.randrange(1, 4)
        path = tmp_path / f"life-{life}" / "shard-0"
        ours, theirs = context.Pipe()
        process = context.Process(target=write_forever, args=(path, theirs, moment, writes), daemon=True)
        process.start()
        theirs.close()
        for _ in range(writes):
            assert ours.poll(HANG_S)
            written = ours.recv()
        process.kill()
        process.join()
        unfinished += path.with_suffix(".new").exists()
        memory = Snapshots(path, 1.0).read()
        if written == 0:
            assert memory is None
            continue
        assert memory is not None
        clock = memory.applied[0]
        assert clock >= written
        assert memory.applied == {0: clock, 1: 2 * clock}
        assert all(bool((weight == clock).all()) for weight in memory.weights), "all of one moment"
    assert unfinished >= 13, "those of the last two moments"


# --- while training goes on


def test_only_the_copy_is_made_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = serving_one(shard_config(tmp_path))
    pushed(shard, 1)
    writing, go_on = Event(), Event()

    write = snapshots.write_snapshot

    def slow(*args: Any) -> None:
        writing.set()
        assert go_on.wait(HANG_S)
        write(*args)

    monkeypatch.setattr(snapshots, "write_snapshot", slow)
    writer = Thread(target=shard.snapshots.write, args=(shard._copy_state,))
    writer.start()
    assert writing.wait(HANG_S)
    assert shard.changed.acquire(blocking=False), "the disk holds nobody up"
    shard.changed.release()
    pushed(shard, 2)
    go_on.set()
    writer.join()
    memory = shard.snapshots.read()
    assert memory is not None and memory.applied == {0: 1}
    assert all(bool((weight == 1).all()) for weight in memory.weights), "nor does later training get in"


def test_the_copy_takes_memory_once(tmp_path: Path) -> None:
    shard = serving_one(shard_config(tmp_path))
    shard.snapshots.write(shard._copy_state)
    before = [part.data_ptr() for part in shard.snapshots._copy.weights]
    pushed(shard, 1)
    shard.snapshots.write(shard._copy_state)
    assert [part.data_ptr() for part in shard.snapshots._copy.weights] == before


# --- what is not as it was written


def written(folder: Path) -> Path:
    shard = serving_one(shard_config(folder))
    shard.snapshots.write(shard._copy_state)
    return shard.snapshots.path


def test_none_is_no_error(tmp_path: Path) -> None:
    assert Snapshots(tmp_path / "nowhere" / "shard-0", 1.0).read() is None


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_one_that_is_cut_off_is_refused_with_a_hint(tmp_path: Path, kept: float) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(OffbeatError, match=r"shard-0 cannot be read \(.+\): move it away to start anew"):
        ShardServer(shard_config(tmp_path), dist.HashStore(), b"secret")


@pytest.mark.parametrize("content", [b"rubbish" * 100, {"weights": []}, [1, 2], torch.ones(3)], ids=repr)
def test_what_is_no_snapshot_is_refused_with_a_hint(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "shard-0"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(OffbeatError, match="move it away to start anew"):
        ShardServer(shard_config(tmp_path), dist.HashStore(), b"secret")


@pytest.mark.parametrize(
    "sizes",
    [SIZES[:1], [("float32", 61), SIZES[1]], [("float16", 60), SIZES[1]], SIZES[::-1], [*SIZES, SIZES[0]]],
    ids=str,
)
def test_one_of_another_model_is_refused(tmp_path: Path, sizes: list[tuple[str, int]]) -> None:
    written(tmp_path)
    with pytest.raises(OffbeatError, match="shard-0 is of another model, or of other shards: move it away"):
        ShardServer(replace(shard_config(tmp_path), sizes=sizes), dist.HashStore(), b"secret")
    assert (tmp_path / "shard-0").exists()


# --- in the end


@pytest.mark.parametrize("dedicated", [False, True])
def test_an_orderly_end_leaves_nothing_or_the_last_state_behind(tmp_path: Path, dedicated: bool) -> None:
    folder = tmp_path / "snapshots"
    shard = ShardServer(replace(shard_config(folder), dedicated=dedicated), dist.HashStore(), b"secret")
    ran = Thread(target=shard.run, daemon=True)
    ran.start()
    way = ShardChannel(ClientIdentity(shard.store, "127.0.0.1", 0, b"secret", HANG_S), 0, "shard 0")
    shard.load_weights([torch.ones_like(weight) for weight in shard.server.weights])
    pushed(shard, 1)
    (folder / "shard-0.new").parent.mkdir(exist_ok=True)
    way.leave()
    ran.join(HANG_S)
    assert not ran.is_alive()
    left = {path.name for path in tmp_path.rglob("*")} - {"shard-0.previous"}  # the first may be there, too
    assert left == ({"snapshots", "shard-0"} if dedicated else set())
    if dedicated:
        memory = Snapshots(folder / "shard-0", 1.0).read()
        assert memory is not None and memory.applied == {0: 1}
        assert all(bool((weight == 2).all()) for weight in memory.weights)


def test_others_files_in_the_folder_stay(tmp_path: Path) -> None:
    path = written(tmp_path)
    (tmp_path / "shard-1").write_text("another's")
    Snapshots(path, 1.0).end(keep=False)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-1"]


def test_they_are_written_every_so_often(tmp_path: Path) -> None:
    shots, taken = Snapshots(tmp_path / "shard-0", 0.001), Event()
    times: list[int] = []

    def take(copy: ShardState) -> None:
        copy.weights = [torch.zeros(1)]
        times.append(len(times))
        if len(times) == 4:
            taken.set()

    shots.start(take)
    assert taken.wait(HANG_S)
    shots.end(keep=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-0", "shard-0.previous"]


# --- damaged bits


def test_no_flipped_bit_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each of 300 flips, anywhere in the last snapshot, is noticed, and the one before is used."""
    shard, random = serving_one(shard_config(tmp_path)), Random(4)
    shard.snapshots.write(shard._copy_state)
    pushed(shard, 1)
    shard.snapshots.write(shard._copy_state)
    path = shard.snapshots.path
    whole = path.read_bytes()
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        memory = Snapshots(path, 1.0).read()
        assert memory is not None and memory.applied == {0: 0}, "the previous one"
        assert all(bool((weight == 0).all()) for weight in memory.weights)
    assert caplog.text.count("starting from the previous one, which is older") == 300
    path.write_bytes(whole)
    memory = Snapshots(path, 1.0).read()
    assert memory is not None and memory.applied == {0: 1}


def test_a_damaged_snapshot_does_not_replace_the_good_one_before(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.rename(path.with_suffix(".previous"))
    path.write_bytes(b"rubbish")
    shard = ShardServer(shard_config(tmp_path), dist.HashStore(), b"secret")  # which writes at once
    shard.snapshots.end(keep=True)
    for kept in (shard.snapshots.path, shard.snapshots.previous):
        assert Snapshots(kept, 1.0).read() is not None


def test_only_the_owner_can_read_a_snapshot(tmp_path: Path) -> None:
    assert written(tmp_path).stat().st_mode & 0o777 == 0o600


def test_weights_given_anew_leave_no_snapshot_with_other_clocks(tmp_path: Path) -> None:
    """A shard that fell back on one would take new pushes for old ones."""
    shard = serving_one(shard_config(tmp_path))
    for clock in (1, 2):
        pushed(shard, clock)
        shard.snapshots.write(shard._copy_state)
    shard.has_weights = True
    shard.load_weights([torch.zeros_like(weight) for weight in shard.server.weights])
    assert not shard.snapshots.previous.exists()
    shard.snapshots.path.write_bytes(b"rubbish")
    with pytest.raises(OffbeatError, match="cannot be read"):
        Snapshots(shard.snapshots.path, 1.0).read()


# --- the optimizer's state


def test_a_shard_with_the_optimizer_starts_again_with_its_state(tmp_path: Path) -> None:
    """Two steps, a crash and one step are three steps, to the last bit."""
    spec = OptimizerSpec(
        kinds=["Adam"], groups=[{"lr": 0.1}], pieces=[(0, 0, 0, 60, 0), (0, 1, 0, 20, 1)], marks=2
    )
    told = beside.post(tmp_path, SIZES, push="gradient", optimizer=asdict(spec))

    def step(shard: ShardServer, clock: int) -> list[torch.Tensor]:
        update = [torch.full_like(weight, clock) for weight in shard.server.weights]
        with shard.changed:
            shard.dispatch(Push(worker=0, clock=clock, update=update, report=(0.1, 1.0, 1.0)))
        return [weight.clone() for weight in shard.server.weights]

    shard = serving_one(told)
    for clock in (1, 2):
        step(shard, clock)
    shard.snapshots.write(shard._copy_state)
    wanted = step(shard, 3)
    again = ShardServer(told, dist.HashStore(), b"secret")
    again.snapshots.end(keep=True)
    with again.changed:
        again.dispatch(Join(worker=0, clock=2))
    assert all(map(torch.equal, step(again, 3), wanted))
