"""The accuracy of overlapping strategies: every optimizer and rate has its own BSP, seed by seed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from benchmarks.strategies import overlap_accuracy
from benchmarks.strategies.overlap_accuracy import SETUPS, Training
from benchmarks.support import tables


def test_differences_are_between_runs_of_one_seed_and_one_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accuracy(training: Training, folder: Path) -> float:
        base = {("SGD", 0.05): 0.80, ("AdamW", 0.001): 0.90}[training.optimizer, training.lr]
        return base + 0.01 * training.seed + 0.002 * (training.strategy == "osp") * (1 - training.seed)

    monkeypatch.setattr(overlap_accuracy, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(Training, "accuracy", accuracy)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    overlap_accuracy.main(["--data", "here", "--only", "osp", "--sgd", "0.05", "--adamw", "0.001"])
    (path,) = (tmp_path / "overlap_accuracy").glob("*.md")
    rows = [line for line in path.read_text().splitlines() if line.startswith("| SGD") or "AdamW |" in line]
    assert rows == [
        "| SGD | 0.05 | bsp | 81.00 (80.00 – 82.00) |  |  |",
        "| SGD | 0.05 | osp | 81.00 (80.20 – 81.80) | 0.00 (-0.20 – 0.20) | ≥ −0.3 |",
        "| AdamW | 0.001 | bsp | 91.00 (90.00 – 92.00) |  |  |",
        "| AdamW | 0.001 | osp | 91.00 (90.20 – 91.80) | 0.00 (-0.20 – 0.20) | ≥ −0.3 |",
    ]


def test_a_task_has_the_optimizer_of_its_name() -> None:
    for name, kind in {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}.items():
        for setup in SETUPS.values():
            what = setup.build(name, 0.003)
            optimizer = what.optimizer(what.build())
            assert type(optimizer) is kind and optimizer.param_groups[0]["lr"] == 0.003
            assert what.batch_size == setup.batch_size and what.model == setup.model


def test_rates_are_compared_for_bsp_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_accuracy, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(Training, "accuracy", lambda training, folder: training.lr + training.seed / 100)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    overlap_accuracy.main(["--of", "digits-mlp", "--only", "--sgd", "0.1", "0.2", "--seeds", "4", "6"])
    (path,) = (tmp_path / "overlap_accuracy").glob("*-digits-mlp-rates.md")
    assert "| SGD | 0.2 | bsp | 25.00 (24.00 – 26.00) |  |  |" in path.read_text()
