"""Worker of a Slurm job: trains on data of its own, and writes what it saw into a folder."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from tests.support.limits import HANG_S

STEPS, PERIOD = 30, 4  # the last average is two steps before the end


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main(folder: Path) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=PERIOD), timeout_s=HANG_S):
        rank, world = dist.get_rank(), dist.get_world_size()
        for _ in range(STEPS):
            x = torch.randn(32, 8)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        before = digest(model)
    seen = {
        "rank": rank,
        "world": world,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "losses": losses,
        "before": before,
        "after": digest(model),
    }
    (folder / f"{os.getpid()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
