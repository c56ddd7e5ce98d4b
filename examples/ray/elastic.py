"""Elastic workers on Ray:  python examples/ray/elastic.py

Each worker is an actor that Ray starts again when it dies, alone: the others train on, and it joins them. The
workers find each other in a store, which an actor of its own holds.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ray
import torch
from torch import nn

import offbeat


@ray.remote(num_cpus=0)
class Store:
    """The store in which workers find each other, on a node that stays."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "offbeat", "rendezvous", f"{ray.util.get_node_ip_address()}:0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()  # start each worker with  OFFBEAT_RENDEZVOUS=HOST:PORT …
        self._address = said.split()[4].partition("=")[2]

    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@ray.remote(num_cpus=1, max_restarts=3, max_task_retries=3)
class Worker:
    """A worker. When its process dies, Ray starts it again, and calls `train` again."""

    def __init__(self, rank: int, world: int, store: str) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), OFFBEAT_RENDEZVOUS=store)

    def train(self, loop: Callable[[], Any]) -> Any:
        return loop()


def train_elastic(loop: Callable[[], Any], workers: int) -> list[Any]:
    """Run the loop on all workers, and return what it returns on each."""
    store = Store.remote()
    address = ray.get(store.address.remote())
    crew = [
        Worker.options(scheduling_strategy="SPREAD").remote(rank, workers, address) for rank in range(workers)
    ]
    try:
        return list(ray.get([worker.train.remote(loop) for worker in crew]))
    finally:
        ray.get(store.close.remote())


def example_loop() -> float:
    torch.manual_seed(int(os.environ["RANK"]))
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=8), elastic=True) as sync:
        while sync.clock < 200:  # steps of the training, not of this process
            x = torch.randn(16, 10)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
            loss.backward()
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    ray.init()
    print(train_elastic(example_loop, workers=2))
