"""Download of a data set over HTTP: resumed where it stopped, and deleted if its checksum is wrong."""

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

PART = "part-of-"  # prefix of a file that is incomplete or not yet verified
TIMEOUT_S = 60.0

Progress = Callable[[str, int, int], None]  # file name, bytes so far, bytes in all (0: unknown)


def problem(file: File, path: Path) -> str | None:
    """Return how the content of a file differs from the published one; None if it does not."""
    try:
        check(file, chunks(path, "the published file"), path)
    except DataError as error:
        return str(error)
    return None


def check(file: File, content: Iterable[bytes], where: Path | str, into: IO[bytes] | None = None) -> None:
    """Raise DataError if size or checksum differ from the published ones; write the content `into` a file."""
    digest, nbytes = hashlib.sha256(), 0
    for piece in content:
        digest.update(piece)
        nbytes += len(piece)
        if nbytes > file.nbytes:  # a small compressed file can hold a terabyte of zeros
            raise DataError(f"{where}: holds more than {file.nbytes} bytes, the size of {file.name}")
        if into is not None:
            into.write(piece)
    if digest.hexdigest() != file.sha256:
        raise DataError(
            f"{where}: holds {nbytes} bytes with the sha256 {digest.hexdigest()},"
            f" expected {file.nbytes} with {file.sha256}"
        )


def download(manifest: DatasetManifest, folder: Path, progress: Progress) -> list[Path]:
    """Fetch the files that are missing or not as published, and return their paths."""
    present = found(manifest, folder)
    wanted = [f for f in manifest.files if f.name not in present or problem(f, present[f.name]) is not None]
    if not wanted:
        return []
    target = next(iter(present.values())).parent if present else folder / manifest.folder
    try:
        target.mkdir(parents=True, exist_ok=True)
        fetched = _fetch(manifest.addresses, wanted, target, progress)
        for file in wanted:  # a damaged copy under another suffix might be found before the new file
            old = present.get(file.name)
            if old is not None and old not in fetched:
                old.rename(f"{old}.damaged")
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror})") from error
    return fetched


def _fetch(addresses: Iterable[str], wanted: list[File], target: Path, progress: Progress) -> list[Path]:
    """Fetch the files from the first address that works; if none does, report what went wrong with each."""
    fetched: list[Path] = []
    problems: list[str] = []
    for address in addresses:
        try:
            if "{name}" not in address:
                return _from_archive(address, wanted, target, progress)
            for file in wanted[len(fetched) :]:
                fetched.append(_single(address.format(name=file.name), file, target, progress))
            return fetched
        except DataError as error:
            problems.append(str(error))
    raise DataError("; ".join(problems))


def _single(address: str, file: File, target: Path, progress: Progress) -> Path:
    """Fetch and verify one file."""
    name = Path(address).name
    part = _transfer(address, target / f"{PART}{name}", progress)
    with _remove_on_error(part):
        check(file, chunks(part, "the published file"), address)
        return part.rename(target / name)


def _from_archive(address: str, wanted: list[File], target: Path, progress: Progress) -> list[Path]:
    """Fetch an archive and unpack the wanted members, each under its own name."""
    archive = _transfer(address, target / f"{PART}{Path(address).name}", progress)
    missing = {file.name: file for file in wanted}
    paths = []
    with _remove_on_error(archive):
        try:
            for name, content in _members(archive):
                if file := missing.pop(name, None):
                    paths.append(_unpack(file, content, target, address))
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile) as error:
            raise DataError(f"{address}: is a damaged archive ({error})") from error
        if missing:
            raise DataError(f"{address}: the archive lacks {', '.join(missing)}")
    archive.unlink()
    return paths


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the files of an archive by their names without folders."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as unzipped:
            for name in unzipped.namelist():
                with unzipped.open(name) as content:
                    yield Path(name).name, content
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and (extracted := tar.extractfile(member)):
                    yield Path(member.name).name, extracted


def _unpack(file: File, content: IO[bytes], target: Path, address: str) -> Path:
    """Write and verify one member of an archive."""
    part = target / f"{PART}{file.name}"
    with _remove_on_error(part):
        with part.open("wb") as into:
            check(file, iter(lambda: content.read(CHUNK), b""), f"{file.name} of {address}", into)
        return part.rename(target / file.name)


def _transfer(address: str, part: Path, progress: Progress) -> Path:
    """Download an address into `part`, from where an earlier transfer stopped."""
    with _remove_if_empty(part), part.open("ab") as file:
        have = file.tell()
        request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                if response.status != http.HTTPStatus.PARTIAL_CONTENT:  # the server sends the whole file
                    have = file.truncate(0)
                total = have + int(response.headers.get("Content-Length") or 0)
                while piece := response.read(CHUNK):
                    have += file.write(piece)
                    progress(part.name.removeprefix(PART), have, total)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # the file was complete already
                return part
            raise DataError(f"{address}: the server answers {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise DataError(f"{address}: cannot be reached, or broke off ({reason})") from error
    if have < total:
        raise DataError(
            f"{address}: broke off after {have} of {total} bytes; run it again to continue from there"
        )
    return part


@contextmanager
def _remove_if_empty(part: Path) -> Iterator[None]:
    """Remove the file afterwards if nothing was written to it."""
    try:
        yield
    finally:
        if not part.stat().st_size:
            part.unlink()


@contextmanager
def _remove_on_error(part: Path) -> Iterator[None]:
    """Remove the file if the block raises an error."""
    try:
        yield
    except Exception:
        part.unlink(missing_ok=True)
        raise
