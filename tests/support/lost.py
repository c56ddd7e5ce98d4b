"""Ranks that are lost for certain, and the others, which may be slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offbeat.worlds.processes.failure import FailureDetector
from offbeat.worlds.processes.store import wait_for
from tests.support.limits import HANG_S


def wait_for_all_but(lost: int, patch: pytest.MonkeyPatch) -> None:
    """Let a roll call end when all ranks but the lost one have answered, instead of after some seconds.

    On a busy machine those who live may need longer to answer than the product waits for them.
    """

    def patient(rollcall: FailureDetector, patience_s: float) -> bool:
        wait_for(lambda: rollcall._silent() in ([], [lost]), HANG_S)
        return not rollcall._silent()

    patch.setattr(FailureDetector, "_all_answer", patient)


def patched(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a rank of a crew, which takes a patch that lasts as long as the call."""
    with pytest.MonkeyPatch.context() as patch:
        return function(*args, patch)
