"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.core.files import write_atomic
from tests.support.small_disk import SmallDisk
from tests.support.small_disk import small_disk as small_disk


def test_the_new_content_replaces_the_old_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "summary.json"
    assert write_atomic(path, "old") == path
    write_atomic(path, "new: ½\n")
    assert path.read_text(encoding="utf-8") == "new: ½\n"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_text_that_cannot_be_written_leaves_the_old_content(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "summary.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "old"


def test_a_reader_that_has_the_old_file_open_reads_all_of_it(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "summary.json", "old content")
    with path.open() as file:
        assert file.read(3) == "old"
        write_atomic(path, "new")
        assert file.read() == " content"


def test_a_full_disk_leaves_no_part_behind(small_disk: SmallDisk) -> None:
    path = write_atomic(small_disk.folder / "summary.json", "old")
    small_disk.fill()
    before = sorted(small_disk.folder.iterdir())
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new" * 10_000)
    assert sorted(small_disk.folder.iterdir()) == before
    assert path.read_text() == "old"
