"""GSSP: grouped stale-synchronous parallel (Sun et al., 2022).

    worker:           wait while clock > (slowest clock of its group) + s;  pull;  step;  push
    group server G:   fold the push in (scaled 1/N);  S += push;  every |G| pushes tell the others S;  S ← 0
    on a peer's S:    fold it in

Workers of like speed share a group, a server for each holds weights of its own, and groups run apart: a slow
worker holds up only those of its own group. Servers of groups live side by side, so they tell each other
without a wire and without waiting (grouped_server.py).

The paper's: groups, SSP inside of them, exchange without waiting; in the authors' code groups are fixed, and
s = 3. Ours: `groups="auto"`, which measures the first `window` steps of each worker, joins those whose times
differ by no more than `likeness`, and looks again every `window` steps of the slowest (group_rule.py).

With `sparse`, each group's pushes are cut down by its speed and the epoch: gdtopk.py has that rule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from offbeat.codecs import Codec
from offbeat.core.fields import Instance, Number, Text, Whole
from offbeat.core.replica import Replica
from offbeat.errors import SettingError
from offbeat.server.apply import MakeApply
from offbeat.server.server import ShardState
from offbeat.strategies.gssp.gdtopk import GDTopK
from offbeat.strategies.gssp.rule import GroupRule
from offbeat.strategies.gssp.server import GroupedServer
from offbeat.strategies.push_pull import PushPullState
from offbeat.strategies.ssp import SSP

AUTO = "auto"
GROUPS = '"auto", or workers by number, from the fastest group to the slowest, such as "0-3,6/4,5"'


@dataclass
class GSSPState(PushPullState):
    """The state of SSP, and the speed of the worker's group."""

    speed: int = 1
    sparse: GDTopK | None = field(default=None, metadata={"saved": False})  # with the steps of an epoch


@dataclass(frozen=True, kw_only=True)
class GSSP(SSP):
    """SSP among workers of like speed, each group with a server of its own."""

    name = "gssp"
    summary = "SSP inside groups of workers of like speed, whose servers tell each other without waiting"

    groups: Annotated[
        str, Text('"auto", or the workers of each group by number, such as "0-3,6/4,5"', noun=GROUPS)
    ] = AUTO
    likeness: Annotated[
        float,
        Number(
            "ratio of step times up to which workers share a group", noun="a ratio of step times", at_least=1
        ),
    ] = 1.25
    window: Annotated[
        int, Whole("steps that are timed before workers are grouped", of="steps", at_least=1)
    ] = 8
    sparse: Annotated[
        GDTopK | None, Instance("sparsity of pushes; None: pushes are whole", of=GDTopK, noun="a GDTopK()")
    ] = None

    def check(self) -> None:
        assigned(self.groups)
        if self.sparse is not None and self.codec is not None:
            raise SettingError(
                f"codec={self.codec} and sparse={self.sparse}: pushes travel in one of the two"
            )

    def rule(self) -> GroupRule:
        return GroupRule(self.staleness, assigned(self.groups), self.likeness, self.window)

    def server(self, memory: ShardState, folding: MakeApply) -> GroupedServer:
        return GroupedServer(memory, self.rule(), folding)

    @property
    def forms(self) -> Sequence[Codec]:
        return self.sparse.forms if self.sparse else super().forms

    @property
    def answered_in(self) -> Codec | None:
        return self.sparse.answered_in if self.sparse else None

    def init(self, replica: Replica) -> GSSPState:
        sparse = self.sparse if self.forms else None
        if sparse is not None and sparse.epoch_steps is None:
            steps = replica.inputs.steps_per_epoch
            if steps is None:
                raise SettingError("GDTopK goes by epochs: say how many steps one has: GDTopK(epoch_steps=…)")
            sparse = replace(sparse, epoch_steps=steps)
        plain = super().init(replica)
        if sparse is not None:
            plain.kept = [torch.zeros_like(weight) for weight in replica.weights]
        return GSSPState(plain.clock, plain.base, plain.update, plain.kept, sparse=sparse)

    def form(self, state: PushPullState) -> int:
        assert isinstance(state, GSSPState)
        if state.sparse is not None:
            return state.sparse.form(state.speed, state.clock)
        return super().form(state)

    async def _land(self, state: PushPullState, replica: Replica) -> bool:
        assert isinstance(state, GSSPState)
        if state.flying:
            _, state.speed = await state.flying[0]
        return await super()._land(state, replica)


def assigned(groups: str) -> tuple[tuple[int, ...], ...]:
    """`"0-3,6/4,5"` as two groups, the first of five workers; none for `"auto"`."""
    if groups == AUTO:
        return ()
    if not re.fullmatch(r"\d+(-\d+)?([,/]\d+(-\d+)?)*", groups):
        raise SettingError(f"groups={groups!r}: {GROUPS}")
    parts = [[part.partition("-") for part in group.split(",")] for group in groups.split("/")]
    named = [[w for a, _, b in group for w in range(int(a), int(b or a) + 1)] for group in parts]
    if not all(named) or len({w for group in named for w in group}) < sum(map(len, named)):
        raise SettingError(f"groups={groups!r}: every worker once, and no empty range")
    return tuple(map(tuple, named))
