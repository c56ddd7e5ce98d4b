"""A plan's file: what is written is read back, and every mistake in it is told with its line and key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from offbeat import GSSP, OSP, ErrorFeedback, GDTopK, LocalSGD, Quantize, SelSync, Strategy
from offbeat.cli.plan import HEADER
from offbeat.core.settings import non_defaults
from offbeat.errors import SettingError
from offbeat.experiments.planner.candidates import CANDIDATES
from offbeat.experiments.planner.plan_file import Plan, Ranked, load_plan, save_plan
from offbeat.experiments.planner.ranking import label_of
from offbeat.worlds.virtual.cluster import Cluster, Workers
from offbeat.worlds.virtual.step_times import Measured

MORE = [
    LocalSGD(period=3, weighted=True, codec=ErrorFeedback(Quantize(8))),
    SelSync(delta=math.inf, late=True, smoothing=0.5, period=4),
    GSSP(sparse=GDTopK(more="fast", ratio=0.1), groups="0,1/2,3"),
    OSP(budget=0.5, on="server"),
]


def plan_of(strategy: Strategy[Any], **more: Any) -> Plan:
    given: dict[str, Any] = {
        "task": "digits",
        "model": "cnn",
        "batch_size": 16,
        "lr": 0.03,
        "strategy": strategy.name,
        "strategy_settings": non_defaults(type(strategy), strategy.settings()),
        "workers": 4,
        "steps": 100,
        "target": 0.95,
    }
    return Plan(**(given | more))


@pytest.mark.parametrize("strategy", [*CANDIDATES, *MORE], ids=label_of)
def test_a_strategy_comes_back_with_all_its_settings(tmp_path: Path, strategy: Strategy[Any]) -> None:
    save_plan(tmp_path / "plan.toml", plan_of(strategy), HEADER)
    read = load_plan(tmp_path / "plan.toml")
    assert read == plan_of(strategy)
    assert read.make_strategy() == strategy


def test_without_a_rate_the_tasks_own_is_taken(tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.toml", plan_of(LocalSGD(), lr=None), HEADER)
    read = load_plan(tmp_path / "plan.toml")
    assert "lr" not in read.options() and read.lr is None
    assert read.make_task().lr == 0.03


def test_everything_else_comes_back_too(tmp_path: Path) -> None:
    step_s = Measured(measured_s=(0.1, 0.2), ready=(0.5, 0.9))
    measured = Cluster(
        workers=tuple(Workers(step_s=step_s, up_bits_per_s=5e7, down_bits_per_s=4.9e7) for _ in range(2)),
        operation_s=1e-3,
        forward_share=0.3,
        summary='as measured, "twice"',
    )
    ranking = (
        Ranked(
            strategy="bsp",
            strategy_settings={},
            seconds_to_target=1.5,
            bytes_sent=1e9,
            value=0.96,
            risk="none",
        ),
        Ranked(
            strategy="local_sgd", strategy_settings={"weighted": True, "period": 2}, fate="stopped at 2 s"
        ),
    )
    plan = plan_of(
        CANDIDATES[0],
        seed=-3,
        evaluate_every=7,
        bandwidth="50mbit",
        pace="20ms",
        slow=("1=4.0", "2=2"),
        device="cuda",
        made_by="offbeat plan 'a b'",
        measured=measured,
        ranking=ranking,
    )
    save_plan(tmp_path / "deep" / "plan.toml", plan, HEADER)
    assert load_plan(tmp_path / "deep" / "plan.toml") == plan
    assert (tmp_path / "deep" / "plan.toml").read_text().startswith(HEADER)
    taken = plan.options()
    assert (taken["slow"], taken["pace"], taken["seed"]) == (["1=4.0", "2=2"], "20ms", -3)
    assert not {"cluster", "settings", "ranking", "measured", "made_by"} & taken.keys()


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ('task = "digits"', 'task = "digit"', 2, "task: unknown task 'digit'; did you mean 'digits'?"),
        ('model = "cnn"', 'model = "gpt"', 3, "model: digits has no model 'gpt'"),
        (
            "batch_size = 16",
            "batch_size = 1.5",
            4,
            "batch_size: expected a whole number, at least 1, not 1.5",
        ),
        ("lr = 0.03", 'lr = "fast"', 5, "lr: expected a finite number, not 'fast'"),
        ("lr = 0.03", "lr = -1.0", 5, "lr: lr=-1.0: a finite number above 0"),
        ('"local_sgd"', '"local"', 6, "strategy: unknown strategy 'local'; did you mean 'local_sgd'?"),
        ("period = 2", "periods = 2", 7, "settings: local_sgd has no setting 'periods'"),
        ("period = 2", 'period = "two"', 7, "settings: period='two': a whole number of steps, at least 1"),
        ("period = 2", "period = 0", 7, "settings: period=0: a whole number of steps, at least 1"),
        ("period = 2", "period = [2]", 7, "settings.period: expected a text, a number, true or false"),
        ("period = 2", 'codec = "zip"', 7, "settings: codec: 'zip': unknown codec 'zip'"),
        ("{ period = 2 }", "8", 7, "settings: expected a table of settings, such as { period = 8 }, not 8"),
        ("workers = 4", "", 1, "workers: missing; expected a whole number, at least 1"),
        ("workers = 4", "workers = 0", 8, "workers: expected a whole number, at least 1, not 0"),
        ("target = 0.95", "target = nan", 10, "target: expected a finite number, not nan"),
        ("target = 0.95", "goal = 0.95", 10, "goal: not a known field"),
        ("target = 0.95", 'target = 0.95\nbandwidth = "fast"', 11, "bandwidth: 'fast' is not a rate"),
        ("target = 0.95", "target = 0.95\nslow = 3", 11, "slow: expected a list of texts"),
        ("target = 0.95", "target = ", 10, "not TOML: Invalid value"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, problem: str
) -> None:
    file = tmp_path / "plan.toml"
    save_plan(file, plan_of(LocalSGD(period=2)), HEADER)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(SettingError) as told:
        load_plan(file)
    assert str(told.value).startswith(f"{file}, line {line}: {problem}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_bytes(b"\xff\xfe")
    for file, reason in ((tmp_path / "none.toml", "No such file"), (tmp_path / "odd.toml", "not UTF-8")):
        with pytest.raises(SettingError, match=f"{file.name}: the plan cannot be read: .*{reason}"):
            load_plan(file)
