"""Snapshots on a disk that is full for a while, or for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from offbeat.errors import OffbeatError
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server import snapshot_file, snapshots
from tests.support import beside
from tests.support.limits import HANG_S
from tests.support.shards import pushed, serving_one, shard_config
from tests.support.small_disk import SmallDisk
from tests.support.small_disk import small_disk as small_disk
from tests.support.waiting import until


class FullDisk:
    """Stands in for `write_snapshot`: leaves a part of the file, and raises until it is `free`."""

    def __init__(self) -> None:
        self.free, self.refusals, self.refused = False, 0, Event()

    def __call__(self, path: Path, state: ShardState) -> None:
        if self.free:
            return snapshot_file.write_snapshot(path, state)
        path.write_bytes(b"a part")
        self.refusals += 1
        if self.refusals == 3:
            self.refused.set()
        raise OSError(28, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    disk = FullDisk()
    monkeypatch.setattr(snapshots, "write_snapshot", disk)
    monkeypatch.setattr(snapshots, "RETRY_S", 0.01)
    return disk


def test_a_full_disk_is_told_once_and_writing_goes_on_when_there_is_room(
    tmp_path: Path, full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    shard = serving_one(shard_config(tmp_path))
    shard.snapshots.start(shard._copy_state)  # every 1000 s; after a failure sooner
    assert full_disk.refused.wait(HANG_S)
    with shard.snapshots._writing:
        assert not any(tmp_path.iterdir()), "no part is left behind"
    pushed(shard, 1)
    full_disk.free = True
    until(shard.snapshots.path.exists)
    shard.snapshots.end(keep=True)
    memory = shard.snapshots.read()
    assert memory is not None and memory.applied == {0: 1}
    assert caplog.text.count("cannot be written ([Errno 28] No space left on device)") == 1
    assert caplog.text.count("snapshots are written again") == 1


def test_the_final_weights_wait_for_room(tmp_path: Path, full_disk: FullDisk) -> None:
    shard = serving_one(replace(shard_config(tmp_path), dedicated=True))
    shard.has_weights = shard.finished = True
    ran = beside.beside(shard.run)
    assert full_disk.refused.wait(HANG_S)
    full_disk.free = True
    ran.result(HANG_S)
    assert shard.snapshots.read() is not None


def test_final_weights_that_cannot_be_written_are_told_and_the_shard_ends(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    shard = serving_one(replace(shard_config(tmp_path), dedicated=True, timeout_s=0.1))
    shard.has_weights = shard.finished = True
    with pytest.raises(OffbeatError, match=r"the final weights could not be written to .*, and are lost"):
        shard.run()


def test_snapshots_survive_a_disk_that_is_full_for_a_while(small_disk: SmallDisk) -> None:
    """A real one: the last snapshot stays whole, and nothing unfinished lies about."""
    shard = serving_one(shard_config(small_disk.folder / "run"))
    assert shard.snapshots.write(shard._copy_state)
    pushed(shard, 1)
    small_disk.fill()
    assert not shard.snapshots.write(shard._copy_state)
    assert [path.name for path in shard.snapshots.path.parent.iterdir()] == ["shard-0"]
    memory = shard.snapshots.read()
    assert memory is not None and memory.applied == {0: 0}
    small_disk.free()
    assert shard.snapshots.write(shard._copy_state)
    memory = shard.snapshots.read()
    assert memory is not None and memory.applied == {0: 1}
