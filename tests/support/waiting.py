"""Waiting for something that is certain to come about."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from time import monotonic
from typing import Any

from tests.support.limits import HANG_S


def until(true: Callable[[], Any]) -> Any:
    """Look until something has come about."""
    deadline, never = monotonic() + HANG_S, Event()
    while not (value := true()):
        assert monotonic() < deadline, "it did not come about"
        never.wait(0.01)
    return value
