"""The table of runs to the end: differences are between runs of one seed, and the cache can grow."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.papers import trained
from benchmarks.papers.runs import Cache
from benchmarks.support import tables

BSP, OSP = trained.CONTENDERS["BSP"], trained.CONTENDERS["OSP"]


def _add(cache: Cache, contender: trained.Contender, seed: int, value: float, sent: int) -> None:
    outcome = {"value": value, "lssr": 0.5, "bytes_sent": sent, "machine": "a GPU"}
    cache.add(trained.run_of("resnet18", contender, seed), outcome)


def test_differences_are_between_runs_of_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    cache = Cache(tmp_path, "trained")
    for seed, value in ((0, 0.94), (1, 0.95), (2, 0.90)):
        _add(cache, BSP, seed, value, 100)
    for seed, value in ((0, 0.945), (1, 0.945)):
        _add(cache, OSP, seed, value, 50)
    trained.write_table(Cache(tmp_path, "trained"))
    written = next((tmp_path / "results" / "trained").glob("*.md")).read_text()
    assert "| resnet18 | BSP | defaults (defaults) | 3 | 93.00 (90.00 to 95.00) |  | 0.50 | 1.00 |" in written
    assert "| 2 | 94.50 (94.50 to 94.50) | +0.00 (-0.50 to +0.50) | 0.50 | 0.50 |" in written


def test_runs_are_found_again_and_older_keys_stay(tmp_path: Path) -> None:
    run = trained.run_of("lenet5", BSP, 0)
    assert '"schedule": "cosine"' in run.key
    Cache(tmp_path, "trained").add(run, {"value": 1.0})
    assert Cache(tmp_path, "other").get(run) == {"value": 1.0}
    assert Cache(tmp_path, "other").get(trained.run_of("lenet5", BSP, 1)) is None


@pytest.mark.parametrize("model", trained.MODELS)
@pytest.mark.parametrize("name", trained.CONTENDERS)
def test_every_run_can_be_built(model: str, name: str) -> None:
    from benchmarks.papers.runs import cluster_of, strategy_of

    run = trained.run_of(model, trained.CONTENDERS[name], 0)
    assert strategy_of(run).name == run.strategy
    assert cluster_of(run).size == trained.WORKERS
