"""Files that are written whole or not at all."""

import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str) -> Path:
    """Write a file atomically: readers see the old content or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            partial = Path(file.name)
            file.write(text)
        partial.chmod(0o644)
        return partial.replace(path)
    except BaseException:
        if partial is not None:
            partial.unlink(missing_ok=True)
        raise
