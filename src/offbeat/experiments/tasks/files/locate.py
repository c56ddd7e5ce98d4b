"""Location of data sets that are not shipped: in a given folder, or else in the folder of OFFBEAT_DATA."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.manifest import COMPRESSED, DatasetManifest

VARIABLE = "OFFBEAT_DATA"


class MissingData(DataError):
    """An error about missing files of a task's data set, which can be downloaded."""

    def __init__(self, task: str, message: str) -> None:
        super().__init__(message)
        self.task = task


def data_folder(folder: Path | None) -> Path | None:
    """Return the given folder, or the folder of OFFBEAT_DATA; None if neither is set."""
    given = folder or os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else None


def present(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Find which of these files are in a folder, compressed or not."""
    spellings = ((name, folder / f"{name}{suffix}") for name in names for suffix in ("", *COMPRESSED))
    paths: dict[str, Path] = {}
    for name, path in spellings:
        if path.is_file():
            paths.setdefault(name, path)
    return paths


def found(manifest: DatasetManifest, folder: Path) -> dict[str, Path]:
    """Find the files of a data set: all in its own folder, or else all in `folder`."""
    return present(folder / manifest.folder, manifest.names) or present(folder, manifest.names)


def locate(task: str, manifest: DatasetManifest, folder: Path | None) -> dict[str, Path]:
    """Find every file of a task's data, in the manifest's order, or raise `MissingData`."""

    def missing(problem: str) -> MissingData:
        return MissingData(
            task,
            f"{task}: {problem}. Expected in DIR/{manifest.folder} or in DIR, each with or without"
            f" {' or '.join(COMPRESSED)}: {', '.join(manifest.names)}. {manifest.origin}"
            f" Then give DIR as the data folder, or set {VARIABLE}=DIR.",
        )

    parent = data_folder(folder)
    if parent is None:
        raise missing("no data folder is given")
    if not parent.is_dir():
        raise missing(f"there is no folder {parent}")
    paths = found(manifest, parent)
    absent = [name for name in manifest.names if name not in paths]
    if not paths:
        raise missing(f"none of its files is in {parent / manifest.folder} or in {parent}")
    if absent:
        raise missing(f"{next(iter(paths.values())).parent} lacks {', '.join(absent)}")
    return {name: paths[name] for name in manifest.names}
