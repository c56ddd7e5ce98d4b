"""Reading of compressed files: the same content by every suffix, and damage told with the file's name."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.compression import CHUNK, chunks, content, open_uncompressed

CONTENT = bytes(range(256)) * (CHUNK // 256) + b"and a little more"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.fixture(params=COMPRESS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"file{request.param}"
    path.write_bytes(COMPRESS[request.param](CONTENT))
    return path


def test_content_is_the_same_by_every_suffix(file: Path) -> None:
    assert content(file, "bytes") == CONTENT
    assert [len(piece) for piece in chunks(file, "bytes")] == [CHUNK, 17]
    with open_uncompressed(file) as stream:
        assert stream.read(300) == CONTENT[:300]


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".xz", "xz")])
@pytest.mark.parametrize("damage", ["truncated", "something else"])
def test_damage_is_told_with_what_was_expected(tmp_path: Path, suffix: str, kind: str, damage: str) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(COMPRESS[suffix](CONTENT)[:-30] if damage == "truncated" else CONTENT)
    with pytest.raises(
        DataError, match=rf"file{suffix}: damaged or truncated .* expected a whole {kind} file"
    ):
        content(path, "bytes")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"none: cannot be read \(No such file or directory\), expected words"
    ):
        content(tmp_path / "none", "words")
