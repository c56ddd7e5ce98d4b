"""A web server on loopback with two small data files to download."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from offbeat.experiments.tasks.files.manifest import DatasetManifest, File

CONTENTS = {"one": bytes(range(256)) * 40, "two": b"second file\n" * 500}
FILES = tuple(
    File(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in CONTENTS.items()
)


@dataclass
class Site:
    """What a server has to offer, how it behaves, and what it was asked for."""

    root: str = ""
    pages: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True  # whether it can send a part
    breaks_after: int | None = None  # bytes of a page, after which it hangs up
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, range


@pytest.fixture
def site() -> Iterator[Site]:
    offered = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, wanted = self.path.lstrip("/"), self.headers.get("Range")
            offered.asked.append((path, wanted))
            page = offered.pages.get(path)
            if page is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and offered.ranges else 0
            if start >= len(page) > 0:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(page) - start))
            self.end_headers()
            self.wfile.write(page[start : offered.breaks_after])

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        offered.root = f"http://127.0.0.1:{server.server_port}"
        yield offered
        server.shutdown()
        thread.join()


def published(*addresses: str) -> DatasetManifest:
    return DatasetManifest("set", FILES, "Made for tests.", "none", addresses)


def singles(site: Site) -> DatasetManifest:
    site.pages.update({f"{name}.gz": gzip.compress(content) for name, content in CONTENTS.items()})
    return published(site.root + "/{name}.gz")
