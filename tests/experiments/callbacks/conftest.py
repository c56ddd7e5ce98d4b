"""A dashboard that a test moves, closed after the test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.dashboard_stage import Stage


@pytest.fixture
def stage() -> Any:
    stage = Stage()
    yield stage
    stage.dashboard.closed()
