"""The scripts of docs/migrating.md run as they stand there; with BSP both train the same weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrating.md"
DDP, OFFBEAT = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
STRATEGY = "offbeat.LocalSGD(period=8)"

pytestmark = pytest.mark.processes


def _run(folder: str, script: str) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Run a script; return the state of its model, and on rank 0 what it saved."""
    for line in ('dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"):
        assert line in script
        script = script.replace(line, "")  # the crew has a group already
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names: dict[str, object] = {}
        exec(compile(script, str(PAGE), "exec"), names)
        model = names.get("net") or names["model"]
        saved = torch.load("model.pt") if dist.get_rank() == 0 else None
        return model.state_dict(), saved  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["offbeat.BSP()", STRATEGY])
def test_the_scripts_train(crew, tmp_path: Path, strategy: str) -> None:
    assert STRATEGY in OFFBEAT
    (old, saved), _ = crew(2).run(_run, os.fspath(tmp_path), DDP)
    (ours, ours_saved), (theirs, _) = crew(2).run(
        _run, os.fspath(tmp_path), OFFBEAT.replace(STRATEGY, strategy)
    )
    for name, value in old.items():
        assert torch.equal(saved[name], value)
        assert torch.equal(ours[name], theirs[name])
        assert torch.equal(ours[name], ours_saved[name])
        assert torch.equal(ours[name], value) == (strategy != STRATEGY)
