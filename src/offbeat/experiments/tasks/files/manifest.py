"""The manifest of a data set as its authors published it: files, checksums, licence, addresses."""

from __future__ import annotations

from dataclasses import dataclass

COMPRESSED = (".gz", ".xz")  # suffixes that a compressed file may have


@dataclass(frozen=True)
class File:
    """A file by its name without .gz or .xz. Size and checksum are those of its uncompressed content."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class DatasetManifest:
    """The files of a data set, expected in DIR/`folder` or in DIR itself.

    `addresses` are tried in turn. An address with {name} in it is that of a single file; without, that of an
    archive (.zip, .tar.gz) with all files.
    """

    folder: str
    files: tuple[File, ...]
    origin: str
    licence: str
    addresses: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files, without .gz or .xz."""
        return tuple(file.name for file in self.files)
