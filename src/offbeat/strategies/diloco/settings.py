"""Settings of DiLoCo, which of them go together, and the state of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from offbeat.codecs import Codec, CodecField
from offbeat.codecs.all_reduce import MeanAllReduce
from offbeat.core.fields import Choice, Flag, Number, Whole
from offbeat.core.pending import Pending
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.strategies.diloco.eager import OwnPart
from offbeat.strategies.diloco.guard import Guard
from offbeat.strategies.diloco.outer_state import OuterState

OFFLOADS = ("none", "cpu")
PLACES = ("collectives", "server")
# Settings that a server does not have, and their defaults.
COLLECTIVE = {
    "codec": None,
    "fragments": 1,
    "delay": 0,
    "mix": 0.0,
    "average": 0.0,
    "eager": False,
    "offload": "none",
}


@dataclass
class DiLoCoState:
    """The outer optimizer, and the fragment in flight. Lists of tensors have one per dtype and device."""

    step: int = 0
    outer: OuterState = field(default_factory=OuterState)
    reductions: list[MeanAllReduce] = field(default_factory=list)  # with a codec, by fragment
    index: int = 0  # of the fragment in flight
    scattered: list[Pending[Tensor]] = field(default_factory=list)  # this worker's slices of the mean
    gathered: list[Pending[Any]] = field(default_factory=list)  # the next w_global, whole or in slices
    means: list[Tensor] = field(default_factory=list)  # with a codec: −Δ, once it has arrived
    buffers: list[Pending[Tensor]] = field(default_factory=list)  # batch norm's statistics, in flight
    own: OwnPart = field(default_factory=OwnPart)  # with `eager`
    guard: Guard = field(default_factory=Guard)  # with a limit for outliers

    def __post_init__(self) -> None:
        self.send_buffers: list[Tensor] = []  # for any fragment; not saved in checkpoints


@dataclass(frozen=True, kw_only=True)
class DiLoCoSettings(Strategy[DiLoCoState]):
    """The settings of DiLoCo."""

    codec: Annotated[Codec | None, CodecField(splittable="fragments cut through the matrices")] = None
    period: Annotated[int, Whole("steps from one merge of a fragment to its next", at_least=1)] = 32
    outer_lr: Annotated[
        float, Number("learning rate of the outer optimizer", noun="a finite number", above=0)
    ] = 0.7
    outer_momentum: Annotated[
        float, Number("Nesterov momentum of the outer optimizer", at_least=0, below=1)
    ] = 0.9
    fragments: Annotated[int, Whole("fragments of the model, merged one after the other", at_least=1)] = 1
    delay: Annotated[int, Whole("steps of computation that overlap a fragment's exchange", at_least=0)] = 0
    mix: Annotated[
        float, Number("fraction of a worker's own weights that a merge keeps", at_least=0, below=1)
    ] = 0.0
    average: Annotated[
        float, Number("weight of a merge relative to the next in the published mean", at_least=0, below=1)
    ] = 0.0
    eager: Annotated[bool, Flag("apply a worker's own change at once, and the others' a period later")] = (
        False
    )
    outlier_norm: Annotated[
        float | None,
        Number(
            "leave out changes longer than so many medians; None: none",
            noun="a finite number",
            at_least=1,
        ),
    ] = None
    outlier_cosine: Annotated[
        float | None,
        Number("leave out changes with a lower cosine to the others; None: none", at_least=-1, below=1),
    ] = None
    offload: Annotated[str, Choice("whether the outer state lies in the host's memory", of=OFFLOADS)] = "none"

    on: Annotated[str, Choice("where the outer optimizer is", of=PLACES)] = "collectives"
    quorum: Annotated[
        int | None,
        Whole("with on=server, workers whose pushes end a round; None: all", of="workers", at_least=1),
    ] = None
    grace_s: Annotated[
        float | None,
        Number("with on=server, seconds from a round's first push to its end; None: no limit", above=0),
    ] = None

    def check(self) -> None:
        for name, only in COLLECTIVE.items() if self.on_server else ():
            if getattr(self, name) != only:
                raise SettingError(
                    f"on='server' with {name}={getattr(self, name)}: a server gets the whole change of a "
                    f"period at its end, as it is; leave {name} out, or use on='collectives'"
                )
        for name in ("quorum", "grace_s") if not self.on_server else ():
            if getattr(self, name) is not None:
                raise SettingError(
                    f"{name}={getattr(self, name)}: only with on='server'; in a collective operation "
                    "everyone waits for all"
                )
        if self.period % self.fragments:
            allowed = [str(n) for n in range(1, self.period + 1) if self.period % n == 0]
            raise SettingError(
                f"fragments={self.fragments}: must divide period={self.period}: {', '.join(allowed)}"
            )
        if self.delay >= self.stride:
            raise SettingError(
                f"delay={self.delay}: from 0 to {self.stride - 1}, since one of {self.fragments} "
                f"fragments is merged every {self.stride} steps"
            )
        for name, only in (("fragments", 1), ("delay", 0), ("mix", 0)) if self.eager else ():
            if getattr(self, name) != only:
                raise SettingError(
                    f"eager=True with {name}={getattr(self, name)}: eager updates exchange the whole model "
                    f"behind the whole next period, and keep a worker's own part of it; leave {name} out"
                )
        if self.eager and self.guards:
            raise SettingError(
                "eager=True with outlier_norm or outlier_cosine: a worker's own change counts before the "
                "others could tell that it is an outlier; choose one of the two"
            )

    @property
    def stride(self) -> int:
        """The number of steps from one fragment to the next."""
        return self.period // self.fragments

    @property
    def on_server(self) -> bool:
        """True if a parameter server has the outer optimizer."""
        return self.on == "server"

    @property
    def guards(self) -> bool:
        """True if outliers are left out."""
        return self.outlier_norm is not None or self.outlier_cosine is not None
