"""Auto with its changes at steps that are known beforehand, whatever is measured."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat import Auto
from offbeat.core.port import Port
from offbeat.strategies.auto import AutoState
from offbeat.strategies.auto.model import WindowSeconds

CHANGES = {3: 2, 6: 0, 9: 4}  # after which step: the period from then on; 0 is BSP


@dataclass(frozen=True, kw_only=True)
class ScriptedAuto(Auto):
    """Choices fall after the steps 3 and 9 of BSP, and 6 of LocalSGD, between two averages."""

    window: int = 2

    def choose(self, state: AutoState, measured: WindowSeconds, port: Port) -> int:
        return CHANGES.get(state.step, state.period)
