"""Fetching a published data set: over HTTP, resumed where it stopped, kept only if its checksum is right."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from offbeat.errors import DataError
from offbeat.experiments.tasks.files.compression import CHUNK, chunks
from offbeat.experiments.tasks.files.locate import found
from offbeat.experiments.tasks.files.manifest import DatasetManifest, File

PART = "part-of-"  # before the name of what is not there as a whole, or not yet verified
PATIENCE_S = 60.0

Progress = Callable[[str, int, int], None]  # of what, how many bytes are there, of how many (0: unknown)


def problem(file: File, path: Path) -> str | None:
    """Why the content of a file is not what was published; None if it is."""
    try:
        check(file, chunks(path, "the published file"), path)
    except DataError as error:
        return str(error)
    return None


def check(file: File, content: Iterable[bytes], where: Path | str, into: IO[bytes] | None = None) -> None:
    """Compare size and sum of a content with what was published; on the way write it `into` a file."""
    digest, nbytes = hashlib.sha256(), 0
    for piece in content:
        digest.update(piece)
        nbytes += len(piece)
        if nbytes > file.nbytes:  # a small packed file can hold a terabyte of zeros
            raise DataError(f"{where}: holds more than {file.nbytes} bytes, the size of {file.name}")
        if into is not None:
            into.write(piece)
    if digest.hexdigest() != file.sha256:
        raise DataError(
            f"{where}: holds {nbytes} bytes with the sha256 {digest.hexdigest()},"
            f" expected {file.nbytes} with {file.sha256}"
        )


def download(published: DatasetManifest, folder: Path, progress: Progress) -> list[Path]:
    """Fetch the files that are not there, or are not what was published; where they now lie."""
    there = found(published, folder)
    wanted = [f for f in published.files if f.name not in there or problem(f, there[f.name]) is not None]
    if not wanted:
        return []
    place = next(iter(there.values())).parent if there else folder / published.folder
    try:
        place.mkdir(parents=True, exist_ok=True)
        fetched = _first(published.addresses, wanted, place, progress)
        for file in wanted:  # a damaged one under another name, packed or not, might be found before it
            old = there.get(file.name)
            if old is not None and old not in fetched:
                old.rename(f"{old}.damaged")
    except OSError as error:
        raise DataError(f"{place}: cannot be written ({error.strerror})") from error
    return fetched


def _first(addresses: Iterable[str], wanted: list[File], place: Path, progress: Progress) -> list[Path]:
    """From the first address that has them; if none has, all that went wrong."""
    fetched: list[Path] = []
    problems: list[str] = []
    for address in addresses:
        try:
            if "{name}" not in address:
                return _from_archive(address, wanted, place, progress)
            for file in wanted[len(fetched) :]:
                fetched.append(_single(address.format(name=file.name), file, place, progress))
            return fetched
        except DataError as error:
            problems.append(str(error))
    raise DataError("; ".join(problems))


def _single(address: str, file: File, place: Path, progress: Progress) -> Path:
    name = Path(address).name
    part = _transfer(address, place / f"{PART}{name}", progress)
    with _remove_on_error(part):
        check(file, chunks(part, "the published file"), address)
        return part.rename(place / name)


def _from_archive(address: str, wanted: list[File], place: Path, progress: Progress) -> list[Path]:
    """Only the members that are wanted, and only under their own names."""
    archive = _transfer(address, place / f"{PART}{Path(address).name}", progress)
    missing = {file.name: file for file in wanted}
    paths = []
    with _remove_on_error(archive):
        try:
            for name, content in _members(archive):
                if file := missing.pop(name, None):
                    paths.append(_unpacked(file, content, place, address))
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile) as reason:
            raise DataError(f"{address}: is a damaged archive ({reason})") from reason
        if missing:
            raise DataError(f"{address}: the archive lacks {', '.join(missing)}")
    archive.unlink()
    return paths


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of an archive, without their folders."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as unzipped:
            for name in unzipped.namelist():
                with unzipped.open(name) as content:
                    yield Path(name).name, content
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and (held := tar.extractfile(member)):
                    yield Path(member.name).name, held


def _unpacked(file: File, content: IO[bytes], place: Path, address: str) -> Path:
    part = place / f"{PART}{file.name}"
    with _remove_on_error(part):
        with part.open("wb") as into:
            check(file, iter(lambda: content.read(CHUNK), b""), f"{file.name} of {address}", into)
        return part.rename(place / file.name)


def _transfer(address: str, part: Path, progress: Progress) -> Path:
    """Bring what lies at an address into `part`, from where an earlier transfer stopped."""
    with _not_empty(part), part.open("ab") as file:
        have = file.tell()
        request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                if answer.status != http.HTTPStatus.PARTIAL_CONTENT:  # it sends all, from the beginning
                    have = file.truncate(0)
                total = have + int(answer.headers.get("Content-Length") or 0)
                while piece := answer.read(CHUNK):
                    have += file.write(piece)
                    progress(part.name.removeprefix(PART), have, total)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # there is no more than this
                return part
            raise DataError(f"{address}: the server answers {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise DataError(f"{address}: cannot be reached, or broke off ({reason})") from error
    if have < total:
        raise DataError(
            f"{address}: broke off after {have} of {total} bytes; run it again to go on from there"
        )
    return part


@contextmanager
def _not_empty(part: Path) -> Iterator[None]:
    try:
        yield
    finally:
        if not part.stat().st_size:
            part.unlink()


@contextmanager
def _remove_on_error(part: Path) -> Iterator[None]:
    """What turns out to be wrong does not stay."""
    try:
        yield
    except Exception:
        part.unlink(missing_ok=True)
        raise
