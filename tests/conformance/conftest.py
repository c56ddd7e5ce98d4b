"""Here parameter servers are threads of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.beside import lightly
from tests.support.crew import Crew


class LightCrew:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._crew.run(lightly, function, *args)


@pytest.fixture
def crew(crew: Callable[[int], Crew]) -> Callable[[int], LightCrew]:
    return lambda world: LightCrew(crew(world))
