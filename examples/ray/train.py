"""Ray Train with Offbeat:  python examples/ray/train.py

One line differs from a loop under DDP: `prepare_model` is Offbeat's. Every epoch ends with a checkpoint of
Ray's: the model that all workers share, and each one's own state. After a failure Ray starts all workers
again, and they go on as if they had never stopped.
"""

import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.integrations.rank_state import load_rank_state, save_rank_state
from offbeat.integrations.ray import prepare_model


def train_loop_per_worker(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    samples = TensorDataset(x, x.mean(1, keepdim=True))
    loader = prepare_data_loader(
        DataLoader(samples, batch_size=8, shuffle=True)
    )  # each worker its own samples
    model = prepare_model(nn.Linear(10, 1), config["strategy"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with model.sync as sync:
        first_epoch = resume(sync)
        for epoch in range(first_epoch, config["epochs"]):
            if hasattr(loader.sampler, "set_epoch"):  # not with one worker
                loader.sampler.set_epoch(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
            report(sync, model, epoch, loss.item())


def resume(sync: offbeat.Sync) -> int:
    """Load this worker's state from Ray's checkpoint, if there is one; return the epoch to begin with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        load_rank_state(sync, folder)
        return int(torch.load(Path(folder) / "shared.pt")["epoch"]) + 1


def report(sync: offbeat.Sync, model: nn.Module, epoch: int, loss: float) -> None:
    """Report the epoch's loss with a checkpoint: Ray puts the files of all workers into one folder."""
    with tempfile.TemporaryDirectory() as folder:
        with sync.consensus():
            if sync.port.rank == 0:
                shared = {"epoch": epoch, "model": model.module.state_dict()}
                torch.save(shared, Path(folder) / "shared.pt")
        save_rank_state(sync, folder)
        ray.train.report({"loss": loss, "epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))


def fit(config: dict[str, Any], workers: int = 2, storage: str | None = None) -> ray.train.Result:
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    )
    return trainer.fit()


if __name__ == "__main__":
    print(fit({"strategy": offbeat.LocalSGD(period=8), "epochs": 4}).checkpoint)
