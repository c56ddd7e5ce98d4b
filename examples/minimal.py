"""An ordinary training loop with one added line:  torchrun --nproc-per-node 4 examples/minimal.py"""

import torch
import torch.distributed as dist
from torch import nn

import offbeat


def main() -> None:
    dist.init_process_group("gloo")  # attach would do this too, but the next line needs the rank
    torch.manual_seed(dist.get_rank())  # every rank draws its own data …
    # … and other initial weights, which attach replaces by those of rank 0
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=8)) as sync:  # the added line
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
