"""In a narrow terminal, the tables of all commands have every column, and every number whole."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from offbeat import BSP, ErrorFeedback, LocalSGD, Quantize
from offbeat.cli.tables import comparison_table, ranking_table, result_table, worker_table
from offbeat.cli.terminal import Terminal
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.planner.ranking import Outcome
from offbeat.experiments.planner.trials import Trial
from offbeat.experiments.report.aggregate import grouped
from offbeat.experiments.tasks import task

CODEC = "error_feedback(quantize(4))"


def run(strategy: str, seconds: float, settings: dict[str, Any]) -> dict[str, Any]:
    times = {"compute_s": 123.45, "communicate_s": 67.89, "wait_s": seconds}
    workers = [
        {"rank": rank, "steps": 1234, **times, "bytes_sent": 1_230_000, "planned_steps": 16}
        for rank in range(2)
    ]
    reached = {"seconds_to_target": seconds * 0.75, "bytes_to_target": int(seconds * 1e6)}
    return {
        "strategy": strategy,
        "settings": settings,
        "metric": "accuracy",
        "target": 0.875,
        "seconds": seconds,
        "value": 0.5 + seconds / 1000,
        "bytes_sent": int(seconds * 3e6),
        **reached,
        "sync_steps": 1200,
        "steps": 1234,
        "per_worker": workers,
        "seed": 0,
    }


RUNS = [
    run(name, seconds, settings)
    for name, settings in (("bsp", {}), ("local_sgd", {"period": 16, "codec": CODEC}))
    for seconds in (123.4, 234.5)
]


def ranking() -> Table:
    digits = task("digits")
    coded = LocalSGD(codec=ErrorFeedback(Quantize(4)), period=16)
    outcomes = []
    for number, strategy in enumerate((coded, BSP())):
        job = Job(task=digits, strategy=strategy, workers=4, target=0.875)
        trials = [
            Trial(job, (Evaluation(1234, second + number, 0.0, 0.8751, 123_000_000),), second)
            for second in (123.4, 134.5)
        ]
        outcomes.append(Outcome(strategy, tuple(trials)))
    said = "slips back, 0.0123 behind bsp, seeds ±123%, stale by 123, no two runs alike"
    return ranking_table(outcomes, 0.875, "accuracy", lambda _: said, {"cost": lambda _: "$123.45"})


TABLES: dict[str, Callable[[], Table]] = {
    "train": lambda: result_table(RUNS),
    "workers": lambda: worker_table(RUNS[0]),
    "compare": lambda: comparison_table(grouped(RUNS)),
    "compare by defaults": lambda: comparison_table(grouped([run("oscars", s, {}) for s in (1.589, 2.411)])),
    "plan": ranking,
}


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("name", TABLES)
def test_every_column_is_there_and_every_number_whole(name: str, width: int) -> None:
    table = TABLES[name]()
    headers = [str(column.header).split() for column in table.columns]
    numbers = [
        line
        for column in table.columns
        if column.justify == "right"
        for cell in column.cells
        for line in Text.from_markup(str(cell)).plain.splitlines()
    ]
    words = [word for cell in table.columns[-1].cells for word in str(cell).split()]
    terminal = Terminal(width=width, file=StringIO(), force_terminal=True)
    terminal.show(table)
    assert isinstance(terminal.file, StringIO)
    said = Text.from_ansi(terminal.file.getvalue()).plain
    shown = [line for line in said.splitlines() if line.strip()]
    assert max(map(len, shown)) <= width
    found = set(said.split())
    assert [header for header in headers if not set(header) <= found] == []
    assert [number for number in numbers if not any(number in line for line in shown)] == []
    assert [word for word in words if word not in found] == []
    assert "…" not in said
