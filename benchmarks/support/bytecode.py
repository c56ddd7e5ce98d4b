"""Bytecode that the processes of a benchmark keep, so that each start does not compile torch again."""

from __future__ import annotations

import sys
from pathlib import Path

BYTECODE = Path.home() / ".cache" / "offbeat-bytecode"


def cached_bytecode() -> dict[str, str]:
    """Return environment variables with which processes keep bytecode, in a folder of this user.

    Nothing, if Python keeps it anyway. Where PYTHONDONTWRITEBYTECODE is set, each start would compile torch
    again: 6 of its 10 CPU seconds.
    """
    if not sys.dont_write_bytecode:
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(BYTECODE)}
