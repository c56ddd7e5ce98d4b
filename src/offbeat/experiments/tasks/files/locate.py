"""Finding data that is not shipped: in the folder the user gives, or else in that of OFFBEAT_DATA."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.manifest import PACKED, DatasetManifest

VARIABLE = "OFFBEAT_DATA"


def data_folder(folder: Path | None) -> Path | None:
    """The folder that is given, or that of OFFBEAT_DATA; None: neither."""
    given = folder or os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else None


def present(place: Path, names: Iterable[str]) -> dict[str, Path]:
    """Which of these files lie in a folder, and under which name."""
    spellings = ((name, place / f"{name}{packed}") for name in names for packed in ("", *PACKED))
    held: dict[str, Path] = {}
    for name, path in spellings:
        if path.is_file():
            held.setdefault(name, path)
    return held


def found(published: DatasetManifest, folder: Path) -> dict[str, Path]:
    """The files of a data set that are there: all in its own folder, or else all in `folder`."""
    return present(folder / published.folder, published.names) or present(folder, published.names)


def locate(task: str, published: DatasetManifest, folder: Path | None) -> dict[str, Path]:
    """Where each file of a task's data lies, in the order of the files."""

    def missing(problem: str) -> DataError:
        return DataError(
            f"{task}: {problem}. Expected in DIR/{published.folder} or in DIR, each with or without"
            f" {' or '.join(PACKED)}: {', '.join(published.names)}. {published.origin}"
            f" Then give --data DIR, or set {VARIABLE}=DIR;"
            f" `offbeat data {task} --data DIR --download` fetches what is missing."
        )

    place = data_folder(folder)
    if place is None:
        raise missing("no data folder is given")
    if not place.is_dir():
        raise missing(f"there is no folder {place}")
    paths = found(published, place)
    absent = [name for name in published.names if name not in paths]
    if not paths:
        raise missing(f"no file of it lies in {place / published.folder} or in {place}")
    if absent:
        raise missing(f"{next(iter(paths.values())).parent} lacks {', '.join(absent)}")
    return {name: paths[name] for name in published.names}
