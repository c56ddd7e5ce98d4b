"""The table of loops: under each strategy a loop is right, or it is refused, in these words.

`docs/loops.md` has the same table; test_loop_table.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from offbeat import (
    ASP,
    BSP,
    DSSP,
    GSSP,
    OSP,
    SSDSGD,
    SSP,
    DiLoCo,
    LocalSGD,
    Oscars,
    SelSync,
    SparseLoCo,
    Strategy,
)
from tests.conformance.loop_kinds import LOOPS, Loop, averaged, joined, one, one_after_the_other
from tests.support.scripted_auto import ScriptedAuto

Reference = Callable[[Loop, int, int], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy, what its loops are compared with, and the loops that it refuses.

    reference   the same training without Offbeat, in one process; None: the strategy's own plain loop
    exact       the strategy repeats bit for bit; through a server, additions may come in any order
    in_turn     the ranks must step one after the other, for a run to repeat
    differs     loops that train as well, but not to the same numbers, and why
    """

    strategy: Strategy[Any]
    reference: Reference | None = None
    optimizers: Callable[[nn.Module], list[Optimizer]] = one  # of the plain loop
    exact: bool = True
    in_turn: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)


IN_BACKWARD = {"optimizer in backward": "steps inside backward()"}
LBFGS_ACTS = {name: "calls its closure more than once per step" for name in LOOPS if name.startswith("LBFGS")}
LBFGS_TOGETHER = {name: "it steps all parameters together" for name in LOOPS if name.startswith("LBFGS")}
LBFGS_CHANGES = {name: "auto with LBFGS" for name in LOOPS if name.startswith("LBFGS")}
ON_SERVER = {
    "Muon + AdamW": "cannot run a Muon",
    **{name: "cannot run a LBFGS" for name in LOOPS if name.startswith("LBFGS")},
}
TURNS = {"networks in turn": "not all attached optimizers have stepped"}
SKIPS = "GradScaler that skips, accumulation"
EVERY_STEP = averaged(1)

ROWS = {
    "BSP": Row(strategy=BSP(), reference=joined, refused=IN_BACKWARD),
    "LocalSGD": Row(strategy=LocalSGD(period=2), reference=averaged(2)),
    "DiLoCo": Row(strategy=DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0), reference=averaged(2)),
    "SparseLoCo": Row(
        strategy=SparseLoCo(period=2, ratio=1.0, bits=None), reference=averaged(2), exact=False
    ),
    "SelSync": Row(
        strategy=SelSync(delta=0.0, window=2), reference=EVERY_STEP, refused=IN_BACKWARD | LBFGS_ACTS
    ),
    "SelSync (gradients)": Row(
        strategy=SelSync(delta=0.0, window=2, aggregate="gradients"),
        reference=joined,
        refused=IN_BACKWARD | LBFGS_ACTS,
    ),
    "OSP": Row(
        strategy=OSP(budget=0.9, growth=2),
        differs={"accumulation, no context": "late gradients arrive after the first micro-batch"},
        refused=IN_BACKWARD | {"networks in turn": "changed the gradient of critic.0.bias"} | LBFGS_TOGETHER,
    ),
    "SSDSGD": Row(
        strategy=SSDSGD(warmup=1, delay=2),
        refused=IN_BACKWARD | TURNS | LBFGS_TOGETHER,
    ),
    "ASP": Row(
        strategy=ASP(overlap=False),
        reference=one_after_the_other,
        exact=False,
        in_turn=True,
        differs={SKIPS: "the step that was skipped ends with the next backward, and its pull with it"},
    ),
    "SSP": Row(strategy=SSP(staleness=0), reference=EVERY_STEP, exact=False),
    "SSP (gradients)": Row(
        strategy=SSP(staleness=0, push="gradient"),
        reference=joined,
        exact=False,
        refused=IN_BACKWARD | ON_SERVER | TURNS,
    ),
    "DSSP": Row(strategy=DSSP(low=0, high=0), reference=EVERY_STEP, exact=False),
    "GSSP": Row(strategy=GSSP(groups="0-1", staleness=0), reference=EVERY_STEP, exact=False),
    "Oscars": Row(strategy=Oscars(tau=1, limit=1, patience=1e6), reference=EVERY_STEP, exact=False),
    "Auto": Row(strategy=ScriptedAuto(), refused=IN_BACKWARD | LBFGS_CHANGES),
}


# --- the same for readers

SHORT = {  # what a refusal says, in a few words
    "steps inside backward()": "refused: acts between backward and step",
    "calls its closure more than once per step": "refused: acts after the first call",
    "auto with LBFGS": "refused: ranks would call its closure unequally often",
    "cannot run a Muon": "refused: a server cannot run it",
    "cannot run a LBFGS": "refused: a server cannot run it",
    "it steps all parameters together": "refused: it steps all parameters together",
    "not all attached optimizers have stepped": "refused: needs all optimizers after each backward",
    "changed the gradient of critic.0.bias": "refused: needs all optimizers after each backward",
}


def table() -> str:
    """Return the table of docs/loops.md: a line for each loop, with the strategies that do not run it."""
    lines = ["| loop | right under | otherwise |", "|---|---|---|"]
    for loop in LOOPS:
        if loop == "plain":
            continue
        said: dict[str, list[str]] = {}
        for name, row in ROWS.items():
            if loop in row.refused:
                said.setdefault(SHORT[row.refused[loop]], []).append(name)
            elif loop in row.differs:
                said.setdefault(f"other numbers: {row.differs[loop]}", []).append(name)
        right = [name for name in ROWS if not any(name in names for names in said.values())]
        others = "; ".join(f"{', '.join(names)}: {why}" for why, names in said.items())
        which = "all strategies" if len(right) == len(ROWS) else " · ".join(right)
        lines.append(f"| {loop} | {which} | {others} |")
    return "\n".join(lines)
