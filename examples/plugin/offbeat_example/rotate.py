"""Rotate: workers step alone and average one part of their weights after each step, in turn.

    every step t:     w_i ← the optimizer's step with g_i
                      part (t mod `parts`) of w_i ← (1/N) Σ_j of the same part of w_j

Each weight is averaged once in `parts` steps, as under LocalSGD with that period, but the network is used
evenly. With one part, Rotate is LocalSGD with period 1. This is an example of Offbeat's own, from no paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from offbeat import Port, Replica, Strategy
from offbeat.core.fields import Whole


@dataclass
class RotateState:
    """The number of steps so far. Checkpoints contain it."""

    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Rotate(Strategy[RotateState]):
    """Strategy of local steps that averages one of `parts` parts of the weights after each."""

    name = "rotate"
    summary = "step locally, average one of `parts` parts of the weights at each step, in turn"

    parts: Annotated[int, Whole("parts that are averaged in turn", of="parts", at_least=1)] = 4

    def init(self, replica: Replica) -> RotateState:
        return RotateState()

    async def step(self, state: RotateState, replica: Replica, port: Port) -> None:
        await replica.update()  # the user's own optimizer steps
        turn = state.step % self.parts
        state.step += 1
        replica.keep_layout()
        parts = [flat.tensor_split(self.parts)[turn] for flat in replica.weights]  # one per dtype
        sent = [port.all_reduce(part) for part in parts if part.numel()]
        replica.buffers.start(port)  # running statistics, such as batch norm's
        for pending in sent:
            await pending
        await replica.buffers.finish()
