"""Commands on a user's own model, named by `package.module:build` or `file.py:build` in place of a task."""

from __future__ import annotations

from pathlib import Path

import pytest

import offbeat
from offbeat.experiments.planner.plan_file import load_plan
from tests.support import own_workload
from tests.support.commands import command, read_summary, summary_of

pytestmark = pytest.mark.virtual

OWN = "tests.support.own_workload:build"
FILE = f"{own_workload.__file__}:build"


@pytest.mark.parametrize("own", [OWN, FILE], ids=["module", "file"])
def test_the_command_does_what_the_function_does(tmp_path: Path, own: str) -> None:
    args = ["--cluster", "stragglers", "--strategy", "local_sgd", "--set", "period=3", "--workers", 4]
    said = command("simulate", own, *args, "--seed", 5, "--target", 2, "--out", tmp_path)
    assert said.code == 0, said.err
    called = offbeat.simulate(
        **own_workload.build(),
        strategy=offbeat.LocalSGD(period=3),
        cluster="stragglers",
        workers=4,
        seed=5,
        target=2,
    )
    assert {**summary_of(tmp_path), "task": "own"} == called.summary
    assert called.summary["steps"] == 6, "three epochs, as the function says"
    assert "error_on_all" in said.out


def test_options_count_more_than_what_the_function_returns(tmp_path: Path) -> None:
    said = command("simulate", OWN, "--epochs", 1, "--batch-size", 4, "--lr", 1e30, "--out", tmp_path)
    assert said.code == 0, said.err
    summary = summary_of(tmp_path)
    assert (summary["steps"], summary["samples"], summary["value"]) == (4, 64, None)


@pytest.mark.processes
def test_compare_and_plan_take_it_and_train_takes_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other threads, other sums; an earlier test may have set it
    small = ["--workers", 2, "--steps", 6, "--evaluate-every", 3, "--target", 100]
    virtual = ["--strategies", "bsp,local_sgd", "--world", "virtual"]
    said = command("compare", OWN, *virtual, *small, "--out", tmp_path / "compared")
    assert said.code == 0, said.err
    assert [(run["task"], run["strategy"]) for run in read_summary(tmp_path / "compared")] == [
        (OWN, "bsp"),
        (OWN, "local_sgd"),
    ]
    assert (tmp_path / "compared" / "report.html").exists()

    file = tmp_path / "plan.toml"
    candidates = ["--strategies", "local_sgd", "--cluster", "slow-lan"]
    said = command("plan", OWN, *candidates, *small[:-1], 7, "--most-seeds", 1, "--out", file)
    assert said.code == 0, said.err
    plan = load_plan(file)
    assert (plan.task, plan.model, plan.batch_size, plan.lr) == (OWN, "net", 8, None)

    said = command("train", "--from", file, "--out", tmp_path / "trained")
    assert said.code == 0, said.err
    trained = read_summary(tmp_path / "trained")
    assert (trained["world"], trained["complete"], trained["strategy"]) == ("processes", True, plan.strategy)
    virtual_run = offbeat.simulate(
        **own_workload.build(), strategy=plan.make_strategy(), workers=2, steps=6, evaluate_every=3
    )
    for real, virtual_point in zip(trained["history"], virtual_run.history, strict=True):
        assert (real["loss"], real["value"]) == (virtual_point["loss"], virtual_point["value"]), "to the bit"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("mine.py", "'mine.py' is no task: to name a function of yours, write package.module:function"),
        ("no_such_module:build", "there is no module 'no_such_module' in"),
        ("no/such/file.py:build", "there is no file no/such/file.py"),
        ("tests.support.own_workload:biuld", "has no 'biuld'; did you mean 'build'?"),
        ("tests.support.own_workload:PARTS", "is no function: it is of type dict"),
        ("tests.support.own_workload:build_a_list", "expected a dict with model, loss, data and optimizer"),
        (
            "tests.support.own_workload:build_without_a_loss",
            "loss: missing; expected a function of the model",
        ),
    ],
)
def test_what_cannot_be_built_is_told(tmp_path: Path, own: str, message: str) -> None:
    said = command("simulate", own, "--out", tmp_path / "out")
    assert said.code == 2
    assert message in " ".join(said.err.split())
    assert not (tmp_path / "out").exists()


def test_too_few_samples_are_told(tmp_path: Path) -> None:
    said = command("simulate", OWN, "--workers", 9, "--out", tmp_path / "out")
    assert said.code == 2
    assert "9 workers with batches of 8 need 72 samples, but there are 64" in " ".join(said.err.split())
