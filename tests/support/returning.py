"""Workers of a launcher, one of which kills itself: the launcher starts it again, and all end with one model.

python tests/support/returning.py FOLDER      with RANK, WORLD_SIZE and OFFBEAT_RENDEZVOUS
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offbeat
from offbeat.worlds.processes.elastic import heartbeat
from tests.support.elastic import SILENT_LOOKS
from tests.support.limits import HANG_S

STEPS = 20


def kill_once(folder: Path) -> None:
    """Kill this process, if none was killed before."""
    try:
        (folder / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_back(folder: Path) -> dict[str, Any]:
    """Train; the last rank dies after STEPS steps. When it is back, all train STEPS more together."""
    heartbeat.SILENT_LOOKS = SILENT_LOOKS
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    end = folder / "end"  # the number of the last step, known when the dead worker is back
    with offbeat.attach(model, optimizer, offbeat.BSP(), elastic=True, timeout_s=HANG_S) as sync:
        begun = sync.clock
        if (folder / "died").exists():
            end.with_suffix(".part").write_text(str(begun + STEPS))
            end.with_suffix(".part").rename(end)
        while not end.exists() or sync.clock < int(end.read_text()):
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            if rank == world - 1 and sync.clock == STEPS:
                kill_once(folder)
        clock, world = sync.clock, sync.port.world
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return {"rank": rank, "world": world, "begun": begun, "clock": clock, "weights": weights}


def check_returned(workers: list[dict[str, Any]]) -> None:
    """The last worker has joined in the middle, and all have ended with the same step and weights."""
    *stayed, returned = sorted(workers, key=lambda worker: int(worker["rank"]))
    assert [worker["begun"] for worker in stayed] == [0] * len(stayed)
    assert returned["begun"] >= STEPS
    for worker in workers:
        assert worker["world"] == len(workers)
        assert worker["clock"] == returned["begun"] + STEPS
        assert worker["weights"] == returned["weights"]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(train_until_back(out)))
