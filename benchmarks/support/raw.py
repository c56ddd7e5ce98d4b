"""Raw results: finished parts of a benchmark, kept as JSON, so that they can be run one at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.catalog import RESULTS


class RawResults:
    """The kept parts of one benchmark: a file each, seen only when it is whole."""

    def __init__(self, benchmark: str, folder: Path | None = None) -> None:
        self._folder = folder or RESULTS / "raw" / benchmark

    def get(self, part: str) -> Any:
        """Return what was kept of a part; None if nothing was."""
        path = self._path(part)
        return json.loads(path.read_text()) if path.exists() else None

    def keep(self, part: str, outcome: Any) -> None:
        """Keep the outcome of a part, instead of an older one."""
        path = self._path(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(outcome, indent=1) + "\n")
        new.replace(path)

    def _path(self, part: str) -> Path:
        return self._folder / f"{re.sub(r'[^a-z0-9]+', '-', part.lower()).strip('-')}.json"
