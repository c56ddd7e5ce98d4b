"""Results of runs that a benchmark keeps, so that a command which was stopped goes on where it was.

A result is used again only for the same run of the same code: a file says of which.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import offbeat
from offbeat.core.files import write_atomic


@lru_cache(1)
def code_print() -> str:
    """Return a short text that changes with any file of the package."""
    found = hashlib.sha256()
    root = Path(offbeat.__file__).parent
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def kept(file: Path, run: Any, make: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return a run's result from the file, or else make it and write the file; and whether it was there.

    `run` describes the run, as JSON can. A result with a true value of "unfinished" is not kept.
    """
    of = {"run": json.loads(json.dumps(run)), "code": code_print()}
    if file.exists():
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved["of"] == of:
            result: dict[str, Any] = saved["result"]
            return result, True
    result = make()
    if not result.get("unfinished"):
        write_atomic(file, json.dumps({"of": of, "result": result}))
    return result, False
