"""One line in an ordinary loop. Start it with:  torchrun --nproc-per-node 4 examples/minimal.py"""

import torch
import torch.distributed as dist
from torch import nn

import offbeat


def main() -> None:
    dist.init_process_group("gloo")  # attach would do it too; here the rank is wanted before
    torch.manual_seed(dist.get_rank())  # every rank draws other data …
    model = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)
    )  # … but starts with rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=8)) as sync:  # the one line
        for _ in range(200):
            x = torch.randn(32, 20)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with sync.consensus():  # inside, all ranks hold the same model
            x = torch.randn(1000, 20)
            error = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()
        if dist.get_rank() == 0:
            print(f"error {error:.4f}; {sync.metrics}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
