"""Two ranks that run a framework's loop, as its users start it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.scripts import torchrun

Outcome = dict[str, Any]  # of one rank


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    """Run the module's LOOP in all its WAYS, by torchrun or its own `launch`; what each rank has come to."""
    module = request.module
    launch = getattr(module, "launch", torchrun)
    return run_ways(module.LOOP, module.WAYS, tmp_path_factory.mktemp("outcomes"), launch)


def run_ways(
    loop: str,
    ways: dict[str, dict[str, Any]],
    folder: Path,
    launch: Callable[..., str] = torchrun,
) -> dict[str, list[Outcome]]:
    """Run a loop in several ways, one after the other, in the same two processes."""
    outs = {way: folder / str(number) for number, way in enumerate(ways)}
    for out in outs.values():
        out.mkdir()
    wished = json.dumps([{"out": str(outs[way]), **wishes} for way, wishes in ways.items()])
    launch(
        "-m",
        f"tests.integrations.loops.{loop}",
        wished.replace("STOPPED", str(outs.get("stopped"))),
        cwd=folder,
    )
    return {
        way: [{**torch.load(out / f"rank-{rank}.pt"), "out": out} for rank in range(2)]
        for way, out in outs.items()
    }


def check_like_ddp(theirs: list[Outcome], ours: list[Outcome]) -> None:
    """All parameters are the same, bit for bit. DDP does not average what batch norm has seen."""
    for one, other in zip(theirs, ours, strict=True):
        for name, value in one["state"].items():
            if "running" not in name:
                assert torch.equal(value, other["state"][name]), name


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two ranks hold the same model, bit for bit."""
    return all(torch.equal(value, other["state"][name]) for name, value in one["state"].items())
