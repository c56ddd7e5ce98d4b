"""Snapshot files: what is read is what was written, to the last bit and of every kind of tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offbeat.errors import OffbeatError
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.snapshot_file import read_snapshot, sync_folder, write_snapshot


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    weights = [torch.arange(7).to(kind) / 3 for kind in kinds] + [torch.zeros(0)]
    state = ShardState(weights, {3: 17, 0: 4}, [[weight + 1 for weight in weights], weights])
    write_snapshot(tmp_path / "state", state)
    sync_folder(tmp_path)
    found = read_snapshot(tmp_path / "state")
    assert found.applied == state.applied
    pairs = zip([state.weights, *state.optimizer], [found.weights, *found.optimizer], strict=True)
    for written, read in pairs:
        assert [tensor.dtype for tensor in read] == [tensor.dtype for tensor in written]
        assert all(map(torch.equal, read, written))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a snapshot"),
        (b"PK\x03\x04 of another version", "another version"),
        (b"offbeat snapshot 1\n{}\n" + bytes(32), "checksum"),
        (b"offbeat snapshot 1\n", "checksum"),
    ],
)
def test_what_was_not_written_so_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(OffbeatError, match=why):
        read_snapshot(tmp_path / "state")
