"""offbeat plan, where the right choice is known beforehand, and what the command says and writes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from offbeat import BSP, LocalSGD
from offbeat.experiments import process_run
from offbeat.experiments.job import Job
from offbeat.experiments.planner import search as search_module
from offbeat.experiments.planner.candidates import candidates
from offbeat.experiments.planner.plan_file import load_plan
from offbeat.experiments.planner.ranking import CLOSE, Outcome
from offbeat.experiments.planner.search import search
from tests.support.commands import Said, command

pytestmark = pytest.mark.virtual


# --- the command


def plan(out: Path, *args: object) -> Said:
    small = ("--workers", 4, "--steps", 24, "--evaluate-every", 4, "--out", out)
    return command(
        "plan", "quadratic", "--cluster", "slow-lan", "--strategies", "local_sgd,ssp", *small, *args
    )


def test_it_ranks_and_writes_the_best(tmp_path: Path) -> None:
    said = plan(tmp_path / "plan.toml", "--seeds", "3,1", "--lr", 0.05)
    assert said.code == 0, said.err
    read = load_plan(tmp_path / "plan.toml")
    assert (read.task, read.lr, read.workers, read.steps, read.seed) == ("quadratic", 0.05, 4, 24, 3)
    assert (read.evaluate_every, read.cluster, read.measured) == (4, "slow-lan", None)
    assert read.made_by.startswith("offbeat plan quadratic --cluster slow-lan")
    assert len(read.ranking) == len(candidates(["local_sgd", "ssp"]))
    first = read.ranking[0]
    assert (first.strategy, first.strategy_settings) == (read.strategy, read.strategy_settings)
    reached = [each.seconds_to_target for each in read.ranking if each.seconds_to_target is not None]
    assert len(reached) >= 1
    assert reached[1:] == sorted(reached[1:])
    assert reached[0] <= (1 + CLOSE) * min(reached)  # the first one may be the surer one of equals
    shown = " ".join(said.out.split())
    assert "no --target was given: bsp ends at" in shown
    assert "on this cluster codecs and servers compute in no time: `offbeat calibrate" in shown
    tried = len(read.ranking)
    assert f"{tried} of {tried}: ssp codec=error_feedback(quantize(4)), seed 3: " in shown
    assert f"to train with it: offbeat train --from {tmp_path / 'plan.toml'}" in said.out
    assert tomllib.loads((tmp_path / "plan.toml").read_text())["target"] == read.target


def test_the_same_command_writes_the_same_plan(tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        assert plan(tmp_path / "plan.toml", "--force").code == 0
        texts.append((tmp_path / "plan.toml").read_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--target", "nan"], "target=nan: a finite number"),
        (["--strategies", "spp"], "did you mean 'ssp'?"),
        (["--cluster", "lan1g"], "did you mean 'lan-1g'?"),
        (["--pace", "20ms"], "--bandwidth, --pace and --slow are for measurements"),
        (["--seeds", "0,0"], "each seed once"),
        (["--most-seeds", 31], "--most-seeds 31: at most 30 are possible"),
        (["--probe-steps", 0], "--probe-steps 0: at least 1 is needed"),
        (["--steps", 0], "steps=0: a whole number of steps, at least 1"),
        (["--model", "gpt"], "gpt"),
        (["--device", "abacus"], "abacus"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_before_anything_runs(tmp_path: Path, args: list[object], problem: str) -> None:
    said = plan(tmp_path / "plan.toml", *args)
    assert (said.code, said.out) == (2, "")
    assert problem in said.err
    assert not (tmp_path / "plan.toml").exists()


def test_a_target_that_nobody_reaches_writes_nothing(tmp_path: Path) -> None:
    said = plan(tmp_path / "plan.toml", "--target", -1)
    assert said.code == 2
    assert "no candidate reached -1 with every seed" in said.err
    assert "never in" in said.out
    assert not (tmp_path / "plan.toml").exists()


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("mine")
    said = plan(tmp_path / "plan.toml")
    assert said.code == 2
    assert "exists: choose another --out, or give --force" in said.err
    assert (tmp_path / "plan.toml").read_text() == "mine"


def test_under_torchrun_a_described_cluster_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    said = plan(tmp_path / "plan.toml")
    assert said.code == 2
    assert "--cluster slow-lan needs no measurement: start one process, without torchrun" in said.err


def test_an_interrupt_shows_what_is_known_and_writes_nothing(tmp_path: Path) -> None:
    def broken(*args: Any) -> Iterator[Outcome]:
        known = search(*args)
        yield next(known)
        yield next(known)
        raise KeyboardInterrupt

    with patch.object(search_module, "search", broken):
        said = plan(tmp_path / "plan.toml")
    assert said.code not in (0, None)
    assert "1  local_sgd" in said.out
    assert f"interrupted: {tmp_path / 'plan.toml'} is not written" in said.out
    assert not (tmp_path / "plan.toml").exists()


# --- train --from


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "plan.toml"
    assert plan(file, "--lr", 0.05, "--target", 27).code == 0
    return file


def trained(*args: object) -> tuple[Said, Job | None]:
    """What `train` would have trained, without starting any process."""
    jobs: list[Job] = []

    def here(job: Job, place: Any, out: Path, live: Any) -> Any:
        jobs.append(job)
        raise KeyboardInterrupt

    with patch.object(process_run, "train_here", here):
        said = command("train", *args)
    return said, jobs[0] if jobs else None


def test_train_takes_everything_from_the_file(made: Path, tmp_path: Path) -> None:
    read = load_plan(made)
    said, job = trained("--from", made, "--out", tmp_path / "run")
    assert job is not None, said.err
    assert job.strategy == read.make_strategy()
    assert job.task == read.make_task()
    assert (job.workers, job.steps, job.seed, job.evaluate_every) == (4, 24, 0, 4)
    assert job.target == 27


def test_options_count_more_than_the_file(made: Path, tmp_path: Path) -> None:
    text = made.read_text()
    mine = tmp_path / "mine.toml"
    chosen = tomllib.loads(text)
    old = f'strategy = "{chosen["strategy"]}"\nsettings = {text.split("settings = ", 1)[1].splitlines()[0]}'
    assert old in text
    mine.write_text(
        text.replace(old, 'strategy = "local_sgd"\nsettings = { period = 4, weighted = true }', 1).replace(
            "evaluate_every = 4", 'evaluate_every = 4\npace = "5ms"\nslow = ["1=2.0"]', 1
        )
    )
    more = ["quadratic", "--from", mine, "--out", tmp_path / "run"]
    said, job = trained(*more, "--set", "period=16", "--lr", 0.5, "--workers", 3, "--epochs", 2)
    assert job is not None, said.err
    assert job.strategy == LocalSGD(period=16, weighted=True), "one setting given, the other kept"
    assert (job.task.lr, job.workers, job.steps, job.epochs) == (0.5, 3, None, 2)
    shown = " ".join(said.out.split())
    assert "planned for 4 workers, not for 3" in shown
    assert "takes at least 5 ms" in shown
    assert "rank 1 computes 2 times slower" in shown
    said, job = trained(*more, "--strategy", "bsp")
    assert job is not None, said.err
    assert job.strategy == BSP(), "settings of another strategy do not count"
    assert job.steps == 24


def test_a_plan_for_another_task_is_refused(made: Path, tmp_path: Path) -> None:
    said, job = trained("digits", "--from", made, "--out", tmp_path / "run")
    assert job is None
    assert said.code == 2
    assert "is a plan for quadratic, not for digits: leave out TASK or --from" in said.err


def test_a_broken_plan_is_refused_and_without_one_a_task_is_needed(made: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(made.read_text().replace("workers = 4", "wrokers = 4"))
    said, job = trained("--from", tmp_path / "bad.toml")
    assert (job, said.code) == (None, 2)
    assert "bad.toml, line" in said.err
    assert "wrokers: not a known field; did you mean 'workers'?" in said.err
    said, job = trained("--out", tmp_path / "run")
    assert (job, said.code) == (None, 2)
    assert "TASK" in said.err


def test_help_teaches() -> None:
    said = command("plan", "--help")
    assert said.code == 0
    for word in ("--cluster", "--target", "train --from", "slips back", "torchrun"):
        assert word in said.out
    assert "too close to call" in " ".join(said.out.split())
    assert "--from" in command("train", "--help").out
