"""Locating data sets: in which folders and spellings files are found, and what is said of missing ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.locate import VARIABLE, MissingData, data_folder, found, locate, present
from offbeat.experiments.tasks.files.manifest import DatasetManifest, File

MANIFEST = DatasetManifest(
    folder="set",
    files=(File("one", 1, "a"), File("two", 1, "b")),
    origin="Made for tests.",
    licence="none",
    addresses=(),
)


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(name)


def test_a_file_is_found_plain_before_compressed(tmp_path: Path) -> None:
    write(tmp_path, "one.xz", "one.gz", "two", "two.gz", "three.zip")
    assert present(tmp_path, ["one", "two", "three"]) == {"one": tmp_path / "one.gz", "two": tmp_path / "two"}


def test_the_own_folder_of_a_data_set_comes_first(tmp_path: Path) -> None:
    write(tmp_path, "one", "two")
    assert set(found(MANIFEST, tmp_path).values()) == {tmp_path / "one", tmp_path / "two"}
    write(tmp_path / "set", "two.gz")
    assert found(MANIFEST, tmp_path) == {"two": tmp_path / "set" / "two.gz"}, "folders are not mixed"


def test_a_folder_given_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert data_folder(None) is None
    monkeypatch.setenv(VARIABLE, "~/data")
    assert data_folder(None) == Path.home() / "data"
    assert data_folder(tmp_path) == tmp_path


def test_files_come_in_the_order_of_the_manifest(tmp_path: Path) -> None:
    write(tmp_path / "set", "two.xz", "one")
    paths = locate("mine", MANIFEST, tmp_path)
    assert list(paths.items()) == [("one", tmp_path / "set" / "one"), ("two", tmp_path / "set" / "two.xz")]


def test_missing_files_are_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    nowhere = tmp_path / "nowhere"
    some = tmp_path / "some"
    write(some / "set", "two")
    write(tmp_path / "empty")
    for folder, problem in (
        (None, "no data folder is given"),
        (nowhere, f"there is no folder {nowhere}"),
        (tmp_path / "empty", "none of its files is in"),
        (some, f"{some / 'set'} lacks one"),
    ):
        with pytest.raises(MissingData) as missing:
            locate("mine", MANIFEST, folder)
        assert missing.value.task == "mine" and isinstance(missing.value, DataError)
        for part in (f"mine: {problem}", "DIR/set", "one, two", "Made for tests.", f"set {VARIABLE}=DIR"):
            assert part in str(missing.value)
