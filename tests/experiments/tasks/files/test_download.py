"""Fetching data from a real HTTP server on this machine: resumed, verified, and nothing wrong kept."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.download import PART, download, problem
from tests.support.data_site import CONTENTS, FILES, Site, published, singles
from tests.support.data_site import site as site


def silent(what: str, have: int, total: int) -> None: ...


def lying(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_files_are_fetched_verified_and_not_fetched_again(site: Site, tmp_path: Path) -> None:
    what = singles(site)
    steps: list[tuple[str, int, int]] = []
    paths = download(what, tmp_path, lambda *step: steps.append(step))
    assert paths == [tmp_path / "set" / "one.gz", tmp_path / "set" / "two.gz"]
    assert lying(tmp_path / "set") == {"one.gz", "two.gz"}
    assert [problem(file, path) for file, path in zip(FILES, paths, strict=True)] == [None, None]
    size = len(site.pages["one.gz"])
    assert ("one.gz", size, size) in steps
    assert site.asked == [("one.gz", None), ("two.gz", None)]
    assert download(what, tmp_path, silent) == []
    assert len(site.asked) == 2


def test_what_broke_off_is_said_and_resumed(site: Site, tmp_path: Path) -> None:
    what, size = singles(site), len(gzip.compress(CONTENTS["one"]))
    site.breaks_after = 100
    with pytest.raises(DataError, match=f"one.gz: broke off after 100 of {size} bytes"):
        download(what, tmp_path, silent)
    assert lying(tmp_path / "set") == {f"{PART}one.gz"}
    site.breaks_after = None
    download(what, tmp_path, silent)
    assert site.asked == [("one.gz", None), ("one.gz", "bytes=100-"), ("two.gz", None)]
    assert lying(tmp_path / "set") == {"one.gz", "two.gz"}


def test_a_server_that_cannot_resume_sends_all_of_it_again(site: Site, tmp_path: Path) -> None:
    what = singles(site)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / f"{PART}one.gz").write_bytes(b"x" * 10)
    site.ranges = False
    download(what, tmp_path, silent)
    assert site.asked[0] == ("one.gz", "bytes=10-")
    assert lying(tmp_path / "set") == {"one.gz", "two.gz"}


def test_a_part_that_is_whole_is_verified_without_fetching(site: Site, tmp_path: Path) -> None:
    what = singles(site)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / f"{PART}one.gz").write_bytes(site.pages["one.gz"])
    download(what, tmp_path, silent)
    assert lying(tmp_path / "set") == {"one.gz", "two.gz"}


def test_a_wrong_checksum_names_both_and_nothing_stays(site: Site, tmp_path: Path) -> None:
    what = singles(site)
    other = bytes(len(CONTENTS["one"]))
    site.pages["one.gz"] = gzip.compress(other)
    with pytest.raises(DataError) as refusal:
        download(what, tmp_path, silent)
    assert f"sha256 {hashlib.sha256(other).hexdigest()}" in str(refusal.value)
    assert f"expected {len(other)} with {FILES[0].sha256}" in str(refusal.value)
    assert f"{site.root}/one.gz" in str(refusal.value)
    assert lying(tmp_path / "set") == set()


def test_a_part_of_something_else_is_given_up(site: Site, tmp_path: Path) -> None:
    what = singles(site)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / f"{PART}one.gz").write_bytes(b"x" * 10)
    with pytest.raises(DataError, match="expected a whole gzip file"):
        download(what, tmp_path, silent)
    assert lying(tmp_path / "set") == set()
    assert len(download(what, tmp_path, silent)) == 2


def test_a_truncated_packed_file_is_told(site: Site, tmp_path: Path) -> None:
    what = singles(site)
    site.pages["one.gz"] = site.pages["one.gz"][:-20]
    with pytest.raises(DataError, match=r"part-of-one.gz: damaged or truncated"):
        download(what, tmp_path, silent)
    assert lying(tmp_path / "set") == set()


def test_a_packed_file_cannot_fill_the_disk(site: Site, tmp_path: Path) -> None:
    what = singles(site)
    site.pages["one.gz"] = gzip.compress(bytes(50_000_000))
    with pytest.raises(DataError, match=f"holds more than {FILES[0].nbytes} bytes"):
        download(what, tmp_path, silent)


def test_the_next_address_is_tried(site: Site, tmp_path: Path) -> None:
    what = replace(singles(site), addresses=(f"{site.root}/gone/{{name}}.gz", f"{site.root}/{{name}}.gz"))
    assert len(download(what, tmp_path, silent)) == 2
    site.pages.clear()
    with pytest.raises(DataError, match=r"gone/one.gz: the server answers 404 .*; .*404"):
        download(what, tmp_path / "elsewhere", silent)
    assert lying(tmp_path / "elsewhere" / "set") == set()


def test_without_a_network_the_address_is_named(site: Site, tmp_path: Path) -> None:
    what = published("http://127.0.0.1:1/{name}.gz")
    with pytest.raises(DataError, match=r"http://127.0.0.1:1/one.gz: cannot be reached"):
        download(what, tmp_path, silent)
    assert lying(tmp_path / "set") == set()


def archive(kind: str, contents: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out:
            for name, content in contents.items():
                out.writestr(name, content)
    else:
        with tarfile.open(fileobj=made, mode="w:gz") as tar:
            for name, content in contents.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_of_an_archive_only_what_is_wanted_is_unpacked(site: Site, tmp_path: Path, kind: str) -> None:
    inside = {"set/readme": b"hello", "../../escaped": b"!", "set/one": CONTENTS["one"]}
    site.pages[f"all.{kind}"] = archive(kind, inside | {"set/two": CONTENTS["two"]})
    paths = download(published(f"{site.root}/all.{kind}"), tmp_path / "deep" / "data", silent)
    assert [path.read_bytes() for path in paths] == list(CONTENTS.values())
    assert lying(tmp_path / "deep" / "data" / "set") == {"one", "two"}
    assert lying(tmp_path) == {"deep"} and lying(tmp_path / "deep") == {"data"}


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ({"set/one": CONTENTS["one"]}, "the archive lacks two"),
        ({"set/one": CONTENTS["one"], "set/two": b"wrong"}, "two of http.*sha256"),
    ],
)
def test_an_archive_that_is_not_right_leaves_nothing_wrong(
    site: Site, tmp_path: Path, kind: str, inside: dict[str, bytes], told: str
) -> None:
    site.pages[f"all.{kind}"] = archive(kind, inside)
    with pytest.raises(DataError, match=told):
        download(published(f"{site.root}/all.{kind}"), tmp_path, silent)
    assert lying(tmp_path / "set") <= {"one"}


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_a_damaged_archive_is_told(site: Site, tmp_path: Path, kind: str) -> None:
    site.pages[f"all.{kind}"] = archive(kind, dict(CONTENTS))[:-300]
    with pytest.raises(DataError, match="damaged archive"):
        download(published(f"{site.root}/all.{kind}"), tmp_path, silent)
    assert f"{PART}all.{kind}" not in lying(tmp_path / "set")


def test_what_is_damaged_is_replaced_where_it_lies(site: Site, tmp_path: Path) -> None:
    what = singles(site)
    (tmp_path / "one").write_bytes(b"not this")
    (tmp_path / "two.xz").write_bytes(lzma.compress(CONTENTS["two"]))
    assert download(what, tmp_path, silent) == [tmp_path / "one.gz"]
    assert lying(tmp_path) == {"one.damaged", "one.gz", "two.xz"}
    assert download(what, tmp_path, silent) == []


def test_a_folder_that_cannot_be_written_is_told(site: Site, tmp_path: Path) -> None:
    (tmp_path / "set").write_text("a file")
    with pytest.raises(DataError, match="cannot be written"):
        download(singles(site), tmp_path, silent)
