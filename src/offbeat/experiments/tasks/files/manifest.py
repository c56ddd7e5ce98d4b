"""A data set as its authors published it: which files, what they hold, where they are to be had."""

from __future__ import annotations

from dataclasses import dataclass

PACKED = (".gz", ".xz")  # a file may lie there as it is, or under one of these


@dataclass(frozen=True)
class File:
    """A file by its name without .gz or .xz. Size and sum are those of its content, however it is packed."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class DatasetManifest:
    """The files lie in DIR/`folder`, or in DIR itself.

    `addresses` are tried in turn. One with {name} in it holds a single file; without, it is an archive (.zip,
    .tar.gz) with all of them.
    """

    folder: str
    files: tuple[File, ...]
    origin: str
    licence: str
    addresses: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)
