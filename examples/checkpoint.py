"""Checkpoint and exact resume:  torchrun --nproc-per-node 2 examples/checkpoint.py FOLDER

Run the script twice: the second run resumes from the first one's checkpoint. torch.distributed.checkpoint
saves the state that all ranks have in common, and each rank's own (here: weights and momentum between two
averages).
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import offbeat


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=8)) as sync:
        resumed = folder.exists()
        if resumed:
            dcp.load({"sync": sync}, checkpoint_id=folder)
        for _ in range(30):
            x = torch.randn(16, 10)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.mean(1, keepdim=True)).backward()
            optimizer.step()
        dcp.save({"sync": sync}, storage_writer=dcp.FileSystemWriter(folder, overwrite=True))
    if dist.get_rank() == 0:
        print("resumed and saved" if resumed else "saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
