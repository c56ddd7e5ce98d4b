"""Writing files so that no reader ever sees half of one."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str) -> Path:
    """Write `text` to `path` atomically, creating its folder: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
    ) as partial:
        partial.write(text)
    Path(partial.name).chmod(0o644)
    Path(partial.name).replace(path)
    return path
