"""Table of contenders: the function that builds each one, and the settings that a search tries.

Every contender whose settings matter gets the same number of tries at every rate, `TRIES`. DiLoCo, the peer's
and ours, gets `DILOCO_TRIES`, because period and outer learning rate depend on each other. Others have one
setting. Periods come from the same list for all; a task of few steps divides them, for all contenders alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.training import RankSetup, Training

PEER, OURS, LIMIT = "peer", "ours", "limit"
TRIES, DILOCO_TRIES = 4, 6
PERIODS = (32, 64, 16, 128)  # likely ones first: a try much slower than the best so far is cut short
FOUR_BITS = "error_feedback(quantize(4))"
# settings that count steps
IN_STEPS = ("period", "sync_every", "steps", "delay", "first_moments", "second_moments")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A training method, with the settings to try."""

    name: str
    kind: str  # PEER, OURS or LIMIT
    builder: str  # file.function; imported on use, because the peers' libraries may be missing
    needs: str = "torch"  # library that must be installed
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tries: tuple[Mapping[str, Any], ...] = ({},)

    def tries_for(self, divisor: int) -> tuple[Mapping[str, Any], ...]:
        """Return the settings to try, with periods and delays divided by `divisor`."""
        return tuple(
            {name: value // divisor if name in IN_STEPS else value for name, value in tried.items()}
            for tried in self.tries
        )

    def open(self, setup: RankSetup) -> AbstractContextManager[Training]:
        """Start the method on this rank."""
        module, _, function = self.builder.partition(".")
        build = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
        training = build(setup)
        assert isinstance(training, AbstractContextManager)
        return training


def peer(name: str, builder: str, needs: str = "torch", **more: Any) -> Contender:
    """Describe a method of another library."""
    return Contender(name=name, kind=PEER, builder=builder, needs=needs, **more)


def ours(
    name: str, *tries: Mapping[str, Any], builder: str = "offbeat_strategy.attached", **fixed: Any
) -> Contender:
    """Describe a strategy of Offbeat, by default the one with the contender's name."""
    return Contender(
        name=name,
        kind=OURS,
        builder=builder,
        fixed={"strategy": name, **fixed},
        tries=tries or ({},),
    )


def each(setting: str, values: tuple[Any, ...], **more: Any) -> tuple[Mapping[str, Any], ...]:
    """Return one try for each value of a setting."""
    return tuple({setting: value, **more} for value in values)


_ALL = (
    Contender(name="no_exchange", kind=LIMIT, builder="torch_native.no_exchange"),
    peer("ddp", "torch_native.ddp"),
    peer("ddp_fp16", "torch_native.ddp", fixed={"fp16": True}),
    peer(
        "post_local_sgd",
        "torch_native.post_local_sgd",
        tries=each("period", PERIODS, start=0),
    ),
    peer("torchft_local_sgd", "torchft_peer.local_sgd", "torchft", tries=each("sync_every", PERIODS)),
    peer(
        "torchft_diloco",
        "torchft_peer.diloco",
        "torchft",
        tries=(
            {"sync_every": 32, "outer_lr": 0.4},
            {"sync_every": 64, "outer_lr": 0.7},
            {"sync_every": 128, "outer_lr": 0.7},
            {"sync_every": 16, "outer_lr": 0.3},
            {"sync_every": 24, "outer_lr": 0.55},
            {"sync_every": 32, "outer_lr": 0.55},
        ),
    ),
    peer("accelerate_local_sgd", "accelerate_peer.local_sgd", "accelerate", tries=each("steps", PERIODS)),
    ours("local_sgd", *each("period", PERIODS)),
    ours("sparse_loco", strategy="sparse_loco", period=32),
    ours("auto", strategy="auto"),
    ours("local_sgd+quantize", strategy="local_sgd", codec="error_feedback(quantize(8))", period=32),
    ours(
        "diloco",
        {"period": 32, "outer_lr": 0.4},
        {"period": 64, "delay": 24},
        {"period": 16, "outer_lr": 0.3},
        {"period": 32, "outer_lr": 0.4, "delay": 8},
        {"period": 24, "outer_lr": 0.55},
        {"period": 24, "outer_lr": 0.55, "delay": 3, "codec": "bfloat16"},
    ),
    ours(
        "diloco+4bit",
        {"period": 32, "outer_lr": 0.4, "delay": 4},
        {"period": 16, "outer_lr": 0.3, "delay": 4},
        {"period": 32, "outer_lr": 0.4, "delay": 8},
        {"period": 16, "outer_lr": 0.3, "delay": 8},
        {"period": 24, "outer_lr": 0.55, "delay": 4},
        {"period": 32, "outer_lr": 0.55, "delay": 4},
        strategy="diloco",
        codec=FOUR_BITS,
    ),
    ours(  # these two have settings from the benchmark diloco_settings (other seeds): no search
        "diloco+average",
        {"period": 24, "outer_lr": 0.7, "delay": 3},
        strategy="diloco",
        average=0.7,
        codec="bfloat16",
    ),
    ours(
        "diloco+4bit+average",
        {"period": 24, "outer_lr": 0.7, "delay": 4},
        strategy="diloco",
        average=0.7,
        codec=FOUR_BITS,
    ),
    # What the field has found since, each at one setting: no search. Eager updates need little momentum.
    ours("eager", {"period": 32, "outer_lr": 1.0}, strategy="diloco", eager=True, outer_momentum=0.0),
    ours("quorum", {"period": 32, "outer_lr": 0.4}, strategy="diloco", on="server", quorum=3, grace_s=1.0),
    ours("guards", {"period": 32, "outer_lr": 0.4}, strategy="diloco", outlier_norm=4.0, outlier_cosine=-0.3),
    ours("des_loc", {"period": 32, "first_moments": 96, "second_moments": 192}, strategy="local_sgd"),
    ours(
        "muloco",
        {"period": 32, "outer_lr": 0.4},
        builder="offbeat_strategy.attached_with_muon",
        strategy="diloco",
    ),
    ours("selsync", *each("delta", (0.12, 0.2)), {"delta": 0.2, "late": True}, {"delta": 0.12, "period": 8}),
    ours("bsp"),
    ours("bsp+topk", strategy="bsp", codec="error_feedback(topk(0.01))"),
    ours("bsp+powersgd", strategy="bsp", codec="error_feedback(powersgd(4))"),
    ours("osp"),
    ours("ssd_sgd", warmup=50, delay=5),
    ours("oscars"),
    ours("oscars+busy", strategy="oscars", busy=0.8),
    ours("asp"),
    ours("ssp"),
    ours("dssp"),
    ours("gssp"),
)

CONTENDERS: dict[str, Contender] = {contender.name: contender for contender in _ALL}
