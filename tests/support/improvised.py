"""A strategy that exchanges whatever a test wants exchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat import Strategy
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Op, Port
from offbeat.core.replica import Replica


class Note(NamedTuple):
    """One reduction of a step; one that is held is awaited in the next step, or when draining."""

    numel: int
    lane: Lane = Lane.FRONT
    held: bool = False


@dataclass
class Score:
    step: int = 0
    held: list[Pending[Tensor]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Improvised(Strategy[Score]):
    """In each step the notes of the next bar, over and over; a rank may have bars of its own."""

    name = "improvised"
    summary = "whatever a test wants exchanged"

    bars: tuple[tuple[Note, ...], ...]
    others: dict[int, tuple[tuple[Note, ...], ...]] = field(default_factory=dict)

    def init(self, replica: Replica) -> Score:
        return Score()

    async def step(self, state: Score, replica: Replica, port: Port) -> None:
        held, state.held = state.held, []
        bars = self.others.get(port.rank, self.bars)
        for note in bars[state.step % len(bars)]:
            mine = torch.full((note.numel,), port.rank + 1.0)
            pending = port.all_reduce(mine, Op.SUM, note.lane)
            if note.held:
                state.held.append(pending)
            else:
                self.check_total(await pending, port)
        for pending in held:
            self.check_total(await pending, port)
        state.step += 1
        await replica.update()

    async def drain(self, state: Score, replica: Replica, port: Port) -> None:
        for pending in state.held:
            self.check_total(await pending, port)
        state.held.clear()

    @staticmethod
    def check_total(total: Tensor, port: Port) -> None:
        assert (total == port.world * (port.world + 1) / 2).all()
