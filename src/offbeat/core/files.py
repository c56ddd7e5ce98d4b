"""Files that are written whole or not at all."""

import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str) -> Path:
    """Write a file atomically: readers see the old content or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        file.write(text)
    partial = Path(file.name)
    partial.chmod(0o644)
    return partial.replace(path)
