"""Progress shows what matters at any width; whoever interrupts a run is told what has been saved of it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch

from offbeat import LocalSGD
from offbeat.cli.progress import Display, duration, report_interrupt
from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation, Worker
from offbeat.experiments.tasks.quadratic import Quadratic


def told(*files: Path, writes: str = "", error: type[BaseException] = KeyboardInterrupt) -> str:
    said = StringIO()
    with pytest.raises(error), report_interrupt(Terminal(file=said, width=30), *files):
        for name in writes.split():
            (files[0].parent / name).write_text("{}")
        raise error
    return said.getvalue()


def test_what_was_written_is_named(tmp_path: Path) -> None:
    one, two, never = (tmp_path / name for name in ("summary.json", "report.html", "never.json"))
    assert told(one, two, never, writes="summary.json report.html") == (
        f"interrupted: results so far are in {one} and {two}\n"
    )


def test_what_lay_there_before_is_not_of_this_run(tmp_path: Path) -> None:
    old = tmp_path / "summary.json"
    assert told(old) == "interrupted: there are no results yet\n"
    old.write_text("{}")
    assert told(old) == "interrupted: there are no results yet\n"


def test_other_errors_speak_for_themselves(tmp_path: Path) -> None:
    assert told(tmp_path / "summary.json", writes="summary.json", error=ValueError) == ""


# --- the display


def display(width: int, terminal: bool, label: str | None = None) -> tuple[Display, StringIO]:
    """A display in the middle of a run of 100 steps, with rank 1 the slowest."""
    totals = [
        WorkerTotals(rank=0, steps=50, samples=500, compute_s=1.0, wait_s=1.0, bytes_sent=3_000_000),
        WorkerTotals(rank=1, steps=50, samples=500, compute_s=2.0, wait_s=0.0, planned_steps=4),
    ]
    said = StringIO()
    console = Terminal(file=said, width=width, force_terminal=terminal)
    shown = Display(lambda: totals, label=label, console=console)
    now = 1000.0
    with patch("offbeat.cli.progress.time.monotonic", return_value=now):
        shown.started(Job(task=Quadratic(), strategy=LocalSGD(), workers=2), 100)
    shown.evaluated([Evaluation(40, 1.0, 0.5, 0.9712)], totals)
    for step in (30, 50):
        with patch("offbeat.cli.progress.time.monotonic", return_value=(now := now + 10.0)):
            shown.stepped(step, torch.tensor(0.25), cast(Worker, SimpleNamespace(seconds=2.0)))
    return shown, said


@pytest.mark.parametrize(("width", "terminal"), [(80, True), (60, True), (80, False)])
def test_nothing_that_matters_is_cut(width: int, terminal: bool) -> None:
    shown, said = display(width, terminal)
    line = " ".join(said.getvalue().split())
    for part in (
        "50/100",
        "elapsed",
        "left",
        "loss 0.2500",
        "waiting 25%",
        "slowest: rank 1",
        "500 samples/s",
    ):
        assert part in line
    assert "0:25 left" in line, "10 s for 20 steps, and 50 steps are left"
    assert "planned steps 0 4" in line
    assert "3 MB sent" in line
    shown.closed()


def test_a_long_name_takes_no_room_from_the_times() -> None:
    label = "31 of 31: local_sgd codec=error_feedback(quantize(4)) period=4"
    shown, said = display(60, True, label)
    shown.closed()
    words = ("period=4", "50/100", "0:25 left")
    assert [word for word in words if word not in said.getvalue()] == []
    assert "…" not in said.getvalue()


def test_remaining_time_follows_from_the_steps_done() -> None:
    assert [duration(s) for s in (0, 7.4, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]


def test_changes_of_a_strategy_are_told_once_with_their_reasons() -> None:
    shown, said = display(80, terminal=False)
    told = [(1, 0.5, "changed", "LocalSGD(period=8) instead of BSP"), (2, 0.6, "regrouped", "not told here")]
    totals = [WorkerTotals(rank=0, events=told), WorkerTotals(rank=1)]
    for _ in range(2):
        shown.evaluated([Evaluation(60, 1.0, 0.5, 0.9712)], totals)
    assert said.getvalue().count("local_sgd: LocalSGD(period=8) instead of BSP") == 1
    assert "not told here" not in said.getvalue()
