"""Snapshots: whenever the process is killed there is a whole one; what is damaged or not ours is refused."""

from __future__ import annotations

import io
import multiprocessing as mp
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.server.messages import Join, Push
from offbeat.worlds.processes.server.channel import ClientIdentity, ShardChannel
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.snapshots import Snapshots, copy_into
from tests.support import beside
from tests.support.conversations import SIZES
from tests.support.limits import HANG_S

# --- killed in the middle


MOMENTS = ["anywhere", "half of it is written", "it is not in place yet"]


def write_forever(path: Path, told: Connection, moment: str, at: int) -> None:
    """Write 1, 2, 3 … into all of the weights and into the clock, and tell of each that is written.

    The one number `at` comes no further than to its `moment`.
    """
    save, real_fsync = torch.save, os.fsync

    def half(content: Any, file: BinaryIO) -> None:
        whole = io.BytesIO()
        save(content, whole)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        stay()

    def stay(*_: Any) -> None:
        told.send(clock - 1)
        Event().wait()

    weights, clock = [torch.zeros(300_000), torch.zeros(1000, dtype=torch.float64)], 0
    shots = Snapshots(path, 1000.0)

    def take(copy: list[Tensor]) -> dict[int, int]:
        copy_into(copy, weights)
        return {0: clock, 1: 2 * clock}

    while True:
        clock += 1
        if clock == at:
            torch.save = half if moment == MOMENTS[1] else save
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


def post(folder: Path) -> ShardConfig:
    return beside.post(folder, SIZES)


def serving(post: ShardConfig) -> ShardServer:
    shard = ShardServer(post, dist.HashStore(), b"secret")
    shard.seen_workers.add(0)
    with shard.changed:
        shard.dispatch(Join(worker=0))
    return shard


def pushed(shard: ShardServer, clock: int) -> None:
    update = [torch.ones_like(weight) for weight in shard.server.weights]
    with shard.changed:
        shard.dispatch(Push(worker=0, clock=clock, update=update))


def test_only_the_copy_is_made_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = serving(post(tmp_path))
    pushed(shard, 1)
    writing, go_on = Event(), Event()

    save = torch.save

    def slow(*args: Any) -> None:
        writing.set()
        assert go_on.wait(HANG_S)
        save(*args)

    monkeypatch.setattr(torch, "save", slow)
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
    shard = serving(post(tmp_path))
    shard.snapshots.write(shard._copy_state)
    before = [part.data_ptr() for part in shard.snapshots._copy]
    pushed(shard, 1)
    shard.snapshots.write(shard._copy_state)
    assert [part.data_ptr() for part in shard.snapshots._copy] == before


# --- what is not as it was written


def written(folder: Path) -> Path:
    shard = serving(post(folder))
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
        ShardServer(post(tmp_path), dist.HashStore(), b"secret")


@pytest.mark.parametrize("content", [b"rubbish" * 100, {"weights": []}, [1, 2], torch.ones(3)], ids=repr)
def test_what_is_no_snapshot_is_refused_with_a_hint(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "shard-0"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(OffbeatError, match="move it away to start anew"):
        ShardServer(post(tmp_path), dist.HashStore(), b"secret")


@pytest.mark.parametrize(
    "sizes",
    [SIZES[:1], [("float32", 61), SIZES[1]], [("float16", 60), SIZES[1]], SIZES[::-1], [*SIZES, SIZES[0]]],
    ids=str,
)
def test_one_of_another_model_is_refused(tmp_path: Path, sizes: list[tuple[str, int]]) -> None:
    written(tmp_path)
    with pytest.raises(OffbeatError, match="shard-0 is a snapshot of another model: move it away"):
        ShardServer(replace(post(tmp_path), sizes=sizes), dist.HashStore(), b"secret")
    assert (tmp_path / "shard-0").exists()


# --- in the end


@pytest.mark.parametrize("dedicated", [False, True])
def test_an_orderly_end_leaves_nothing_or_the_last_state_behind(tmp_path: Path, dedicated: bool) -> None:
    folder = tmp_path / "snapshots"
    shard = ShardServer(replace(post(folder), dedicated=dedicated), dist.HashStore(), b"secret")
    ran = Thread(target=shard.run, daemon=True)
    ran.start()
    way = ShardChannel(ClientIdentity(shard.store, "127.0.0.1", 0, b"secret", HANG_S), 0, "shard 0")
    shard.load_weights([torch.ones_like(weight) for weight in shard.server.weights])
    pushed(shard, 1)
    (folder / "shard-0.new").parent.mkdir(exist_ok=True)
    way.leave()
    ran.join(HANG_S)
    assert not ran.is_alive()
    assert [path.name for path in tmp_path.rglob("*")] == (["snapshots", "shard-0"] if dedicated else [])
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

    def take(copy: list[Tensor]) -> dict[int, int]:
        copy_into(copy, [torch.zeros(1)])
        times.append(len(times))
        if len(times) == 4:
            taken.set()
        return {0: len(times)}

    shots.start(take)
    assert taken.wait(HANG_S)
    shots.end(keep=True)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0"]
