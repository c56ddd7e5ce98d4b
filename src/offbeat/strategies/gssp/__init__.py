"""GSSP: grouped stale-synchronous parallel (Sun et al., 2022).

    worker:           wait while clock > (slowest clock of its group) + s;  pull;  step;  push
    group server G:   apply the push (scaled 1/N);  S += push;  every |G| pushes send S to the others;  S ← 0
    on a peer's S:    apply it

Workers of similar speed form a group. Each group has a server with weights of its own, and groups run
independently: a slow worker delays only its own group. The groups' servers share one process, so they
propagate pushes to each other without a wire and without waiting (aggregation.py).

The paper's: groups, SSP inside them, exchange without waiting; in the authors' code groups are fixed, and
s = 3. Ours: `groups="auto"`, which measures the first `window` steps of each worker, joins those whose times
differ by no more than `likeness`, and checks again every `window` steps of the slowest (rule.py).

With `sparse`, each group's pushes are sparsified by its speed and the epoch: gdtopk.py has that rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from offbeat.codecs import Codec
from offbeat.core.fields import Instance, Number, Text, Whole
from offbeat.core.port import Notice, Port
from offbeat.core.replica import Replica
from offbeat.errors import SettingError
from offbeat.server.half import ServerHalf
from offbeat.strategies.gssp.aggregation import PerGroup
from offbeat.strategies.gssp.gdtopk import GDTopK
from offbeat.strategies.gssp.rule import GroupRule
from offbeat.strategies.push_pull import PushPull, PushPullState

AUTO = "auto"
GROUPS = '"auto", or workers by number, from the fastest group to the slowest, such as "0-3,6/4,5"'
MIDDLE = 1  # speed of a group between the fastest (0) and the slowest (2)
SPEEDS = ("the fastest group", "the only group, or one between", "the slowest group")


@dataclass
class GSSPState(PushPullState):
    """The state of SSP; its hint is the speed of the worker's group."""

    hint: int = MIDDLE
    sparse: GDTopK | None = field(default=None, metadata={"saved": False})  # with `epoch_steps` set


@dataclass(frozen=True, kw_only=True)
class GSSP(PushPull):
    """Strategy of SSP among workers of similar speed; each group has weights of its own at the server."""

    name = "gssp"
    summary = "SSP inside groups of workers of similar speed, which exchange updates without waiting"

    staleness: Annotated[
        int, Whole("steps that a worker may be ahead of the slowest of its group", of="steps", at_least=0)
    ] = 3
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
        GDTopK | None,
        Instance("sparsity of pushes; None: all entries are sent", of=GDTopK, noun="a GDTopK()"),
    ] = None

    def check(self) -> None:
        assigned(self.groups)
        if self.sparse is not None and self.codec is not None:
            raise SettingError(
                f"codec={self.codec} and sparse={self.sparse}: choose one of the two to compress pushes"
            )

    def rule(self) -> GroupRule:
        return GroupRule(self.staleness, assigned(self.groups), self.likeness, self.window)

    def server_half(self) -> ServerHalf:
        pull_codec = self.sparse.pull_codec if self.sparse else None
        return replace(super().server_half(), aggregation=PerGroup, pull_codec=pull_codec)

    @property
    def slack(self) -> int:
        return self.staleness

    def _push_codecs(self) -> tuple[Codec, ...]:
        return self.sparse.push_codecs if self.sparse else super()._push_codecs()

    def init(self, replica: Replica) -> GSSPState:
        sparse = self.sparse if self._push_codecs() else None
        if sparse is not None and sparse.epoch_steps is None:
            steps = replica.inputs.steps_per_epoch
            if steps is None:
                raise SettingError("GDTopK needs the steps per epoch: give GDTopK(epoch_steps=…)")
            sparse = replace(sparse, epoch_steps=steps)
        plain = super().init(replica)
        if sparse is not None:
            plain.error = [torch.zeros_like(weight) for weight in replica.weights]
        return GSSPState(plain.clock, plain.base, plain.update, plain.error, sparse=sparse)

    async def step(self, state: PushPullState, replica: Replica, port: Port) -> None:
        before = state.hint
        await super().step(state, replica, port)
        if state.hint != before:
            port.record(Notice("regrouped", f"now in {SPEEDS[state.hint]}"))

    def codec_index(self, state: PushPullState) -> int:
        if isinstance(state, GSSPState) and state.sparse is not None:
            return state.sparse.codec_index(state.hint, state.clock)
        return super().codec_index(state)


def assigned(groups: str) -> tuple[tuple[int, ...], ...]:
    """Parse `"0-3,6/4,5"` as two groups, the first of five workers; `"auto"` as none."""
    if groups == AUTO:
        return ()
    if not re.fullmatch(r"\d+(-\d+)?([,/]\d+(-\d+)?)*", groups):
        raise SettingError(f"groups={groups!r}: {GROUPS}")
    parts = [[part.partition("-") for part in group.split(",")] for group in groups.split("/")]
    named = [[w for a, _, b in group for w in range(int(a), int(b or a) + 1)] for group in parts]
    if not all(named) or len({w for group in named for w in group}) < sum(map(len, named)):
        raise SettingError(f"groups={groups!r}: name every worker once, and no empty range")
    return tuple(map(tuple, named))
