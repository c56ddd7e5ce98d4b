"""The papers' tasks run in both worlds, from the command line too, and draw the same random numbers there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from offbeat.core.strategy import Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.process_run import RunOptions, run
from offbeat.experiments.tasks import task
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies.bsp import BSP
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.worlds.virtual.cluster import load_cluster
from tests.support.commands import command, offbeat
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.small_data import TASKS, write_small

pytestmark = pytest.mark.virtual

SMALL: dict[str, dict[str, Any]] = {
    "cifar10": {"model": "vgg11", "batch_size": 4, "lr": 0.01},
    "multi30k": {"source_words": 20, "target_words": 20, "batch_size": 6},
    "wikitext2": {"vocabulary": 9, "context": 7, "batch_size": 4},
    "shakespeare": {"context": 16, "batch_size": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("small")
    write_small(made)
    return made


def _really(job: Job, folder: Path) -> list[Evaluation]:
    return run(job, RunOptions(data=folder, timeout_s=HANG_S), lambda worker: [])


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=2)], ids=str)
def test_both_worlds_train_alike(
    crew: Callable[[int], Crew], folder: Path, name: str, strategy: Strategy[Any]
) -> None:
    """Crops, dropout, clipping, batches by length, batch norm: to the last bit."""
    chosen = task(name, **SMALL[name])
    job = Job(task=chosen, strategy=strategy, workers=2, steps=3, evaluate_every=2)
    real = crew(2).run(_really, job, folder)[0]
    virtual = simulate(job, load_cluster("lan-1g"), chosen.load(folder))

    def known(history: list[Evaluation]) -> list[dict[str, Any]]:
        return [{**asdict(point), "seconds": None} for point in history]

    assert known(virtual) == known(real)
    assert [point.step for point in real] == [2, 3]
    assert len({point.loss for point in real}) == 2
    assert ("perplexity" in real[-1].extra_metrics) == (name == "multi30k")


@pytest.mark.parametrize("name", TASKS)
def test_the_commands_run_them(folder: Path, tmp_path: Path, name: str) -> None:
    """Over processes one of them, the others in virtual time: a process start costs more than the steps."""
    model = ["--model", "vgg11"] if name == "cifar10" else []
    options = ["--workers", 2, "--steps", 2, "--batch-size", 2, "--target", 1e-9]
    job = [name, *model, *options, "--data", folder, "--out", tmp_path / "out"]
    if name == "multi30k":
        done = offbeat("train", *job)
        assert done.returncode == 0, done.stderr
    else:
        said = command("simulate", *job)
        assert said.code == 0, said.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    chosen = task(name)
    assert (summary["metric"], summary["complete"]) == (chosen.metric, True)
    assert summary["higher_is_better"] is chosen.higher_is_better
    assert summary["samples"] == 2 * 2 * 2
    if not chosen.higher_is_better:
        assert summary["seconds_to_target"] is None and summary["value"] > 1
