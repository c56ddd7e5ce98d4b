"""A disk of 64 kB, which a test can fill for real."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


class SmallDisk:
    """A folder on a file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Leave no room at all."""
        with suppress(OSError), (self.folder / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))

    def free(self) -> None:
        (self.folder / "filling").unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "offbeat-test", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root can mount a disk to fill")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)
