"""Gradients from CUDA graphs are those without graphs, to the bit; what no graph can repeat is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import BSP, GSSP, OSP, SSDSGD, SSP, DiLoCo, LocalSGD, Oscars, SelSync
from offbeat.worlds.virtual.cluster import load_cluster
from offbeat.worlds.virtual.cuda_graphs import GraphedGradient, PlainGradient, Trust
from offbeat.worlds.virtual.session import VirtualSession, autograd
from offbeat.worlds.virtual.simulation import run_workers
from tests.conformance.table import AnyStrategy

pytestmark = [
    pytest.mark.virtual,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS, WORKERS, BATCH = 12, 3, 8


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def build(rank: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 5)
    ).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(rank: int, step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(size, 1, 8, 8, generator=generator)
    return images.cuda(), (images.mean((1, 2, 3)) * 20).long().remainder(5).cuda()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, targets = batch
    shifted = images + 0.1 * torch.randn(len(images), 1, 1, 1, device="cuda")  # drawn on the GPU
    return nn.functional.cross_entropy(model(shifted), targets)


def by_cpu_draws(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that no graph can repeat: it draws a number on the CPU."""
    return loss(model, batch) * (0.5 + torch.rand(()).item())


def trained(strategy: AnyStrategy, graphs: bool, loss: Any = loss) -> list[Tensor]:
    models = []

    async def train(session: VirtualSession) -> None:
        models.append(session.model)
        for step in range(STEPS):
            torch.manual_seed(100 * step + session.rank)
            size = BATCH // 2 if step == 7 else BATCH  # of another shape, once
            await session.backward(batch(session.rank, step, size), samples=size)
            await session.update()
            if step % 3 == 1:  # while gradients of other workers, or of this one, are in progress
                await session.look(lambda _: None)
        await session.finish()

    cluster = load_cluster("lan-1g")
    run_workers(WORKERS, cluster, strategy, build, autograd(loss), train, graphs=graphs)
    return [tensor for model in models for tensor in model.state_dict().values()]


STRATEGIES = [
    BSP(),
    LocalSGD(period=3),
    DiLoCo(period=4, fragments=2, delay=1),
    SelSync(delta=0.1, window=3),
    OSP(budget=0.5, growth=2),
    SSDSGD(warmup=2, delay=2),
    SSP(staleness=0),
    SSP(staleness=2),
    GSSP(groups="0,1-2"),
    Oscars(tau=2),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_run_with_graphs_is_the_run_without(strategy: AnyStrategy, caplog: Any) -> None:
    """With dropout, draws on the GPU, batch norm, evaluations, and a batch of another shape."""
    with caplog.at_level(logging.WARNING, "offbeat"):
        ours, plain = trained(strategy, True), trained(strategy, False)
    assert all(map(torch.equal, ours, plain))
    assert not caplog.records


def test_draws_on_the_cpu_are_found_and_no_graphs_used(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "offbeat"):
        ours = trained(BSP(), True, by_cpu_draws)
    assert "without CUDA graphs" in caplog.text and len(caplog.records) == 1
    assert all(map(torch.equal, ours, trained(BSP(), False, by_cpu_draws)))


def test_moved_weights_and_other_modes_are_computed_plainly() -> None:
    model, reference = build()[0], build()[0]
    graphed, plain = GraphedGradient(autograd(loss), model, Trust()), PlainGradient(autograd(loss), reference)

    def check(step: int) -> None:
        grads = []
        for source, of in ((graphed, model), (plain, reference)):
            of.zero_grad()
            torch.manual_seed(step)
            source.start(batch(0, step))
            source.finish()
            grads.append([param.grad.clone() for param in of.parameters() if param.grad is not None])
        assert len(grads[0]) == 6 and all(map(torch.equal, *grads))

    check(0)
    check(1)
    for of in (model, reference):
        first = next(of.parameters())
        first.data = first.detach() * 2
    check(2)
    for of in (model, reference):
        of[3].eval()
    check(3)
