"""Finding data that is not shipped: in the folder the user gives, or else in that of OFFBEAT_DATA."""

import os
from collections.abc import Sequence
from pathlib import Path

from offbeat.errors import DataError

VARIABLE = "OFFBEAT_DATA"


def locate(name: str, files: Sequence[str], folder: Path | None, published: str) -> list[Path]:
    """Where each of the files lies, packed (.gz) or not: all in `folder/name`, or all in `folder`."""

    def missing(problem: str) -> DataError:
        return DataError(
            f"{name}: {problem}."
            f" Expected in DIR/{name} or in DIR, each with or without .gz: {', '.join(files)}."
            f" {published} Then give --data DIR, or set {VARIABLE}=DIR."
        )

    if folder is None:
        given = os.environ.get(VARIABLE)
        if not given:
            raise missing("no data folder is given")
        folder = Path(given)
    folder = folder.expanduser()
    if not folder.is_dir():
        raise missing(f"there is no folder {folder}")

    def present(place: Path) -> dict[str, Path]:
        spellings = ((file, place / f"{file}{packed}") for file in files for packed in ("", ".gz"))
        return {file: path for file, path in spellings if path.is_file()}

    found = present(folder / name) or present(folder)
    absent = [file for file in files if file not in found]
    if len(absent) == len(files):
        raise missing(f"no file of it lies in {folder / name} or in {folder}")
    if absent:
        raise missing(f"{found.popitem()[1].parent} lacks {', '.join(absent)}")
    return [found[file] for file in files]
