"""The tables that commands print."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from offbeat.cli.tables import comparison_table, result_table, shown, worker_table
from offbeat.cli.terminal import Terminal
from offbeat.experiments.report.aggregate import RunGroup, Statistic
from tests.support.commands import compare, read_summary

pytestmark = pytest.mark.virtual


def test_the_table_shows_mean_and_spread_and_what_never_came(tmp_path: Path) -> None:
    said = compare(tmp_path, "--seeds", "0,1,2", "--target", -1.0)
    table = said.out[said.out.index("strategy   ") :]
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("bsp", "local_sgd")] == ["bsp", "local_sgd"]
    assert table.count("never") == 4, "seconds and bytes of two strategies"
    values = [run["value"] for run in read_summary(tmp_path) if run["strategy"] == "bsp"]
    mean = sum(values) / 3
    spread = (sum((v - mean) ** 2 for v in values) / 2) ** 0.5
    assert f"{mean:.4f}" in rows[1]
    assert f"{spread:.4f}" in rows[2]
    assert all(run["seconds_to_target"] is run["bytes_to_target"] is None for run in read_summary(tmp_path))


def rows_of(table: Table) -> list[list[str]]:
    """Return the words of every row, as a wide terminal shows them."""
    console = Console(width=300, file=StringIO())
    console.print(table)
    assert isinstance(console.file, StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_run_is_a_row() -> None:
    workers = [{"compute_s": 3.0, "wait_s": 1.0}, {"compute_s": 1.0, "wait_s": 3.0}]
    run = {
        "strategy": "local_sgd",
        "settings": {"period": 4},
        "metric": "accuracy",
        "target": 0.9,
        "seconds": 4.0,
        "seconds_to_target": 2.5,
        "value": 0.95,
        "bytes_sent": 2_000_000,
        "sync_steps": 2,
        "steps": 8,
        "per_worker": workers,
    }
    never = {**run, "seconds_to_target": None, "value": None, "per_worker": []}
    header, first, second = rows_of(result_table([run, never]))
    assert " ".join(header) == "strategy settings seconds to 0.9 accuracy bytes synced waiting"
    assert (first[0], first[1], first[-1], first[-2]) == ("local_sgd", "period=4", "50%", "2/8")
    assert {"4", "2.5", "0.9500"} <= set(first)
    assert {"never", "–", "0%"} <= set(second)


def test_a_worker_is_a_row() -> None:
    worker = {"rank": 1, "steps": 8, "compute_s": 3.0, "communicate_s": 0.5, "wait_s": 1.25, "bytes_sent": 0}
    table = rows_of(worker_table({"per_worker": [{**worker, "planned_steps": 0}]}))
    assert table[1][:5] == ["1", "8", "3.00", "0.50", "1.25"] and "planned" not in table[0]
    planned = rows_of(worker_table({"per_worker": [{**worker, "planned_steps": 6}]}))
    assert planned[1][-1] == "6" and planned[0][-2:] == ["planned", "steps"]


def test_a_spread_is_shown_where_there_is_one() -> None:
    assert shown(Statistic.of([1.0, 3.0]), "{:.1f}".format) == "2.0\n± 1.4"
    assert shown(Statistic.of([1.0]), "{:.1f}".format) == "1.0"
    assert shown(Statistic.of([]), "{:.1f}".format) == "–"


def test_a_column_of_bytes_has_one_unit() -> None:
    def group(label: str, *sent: int) -> RunGroup:
        runs = [
            {"target": None, "metric": "loss", "bytes_sent": each, "steps": 0, "settings": {}}
            for each in sent
        ]
        return RunGroup(
            label, [{**run, "strategy": "bsp", "seconds": 12.345, "per_worker": []} for run in runs]
        )

    head, many, spread, few, _ = rows_of(
        comparison_table([group("a", 999_900, 3_123_456), group("b", 500, 500)])
    )
    assert head[3:5] == ["MB", "sent"]
    assert ("2.06" in many, "1.5" in spread, "0.0005" in few) == (True, True, True)


def test_the_headers_of_workers_are_never_cut() -> None:
    """At 60 columns the table comes in parts, and each header is whole."""
    worker = {"rank": 0, "steps": 44, "compute_s": 1.0, "communicate_s": 2.0, "wait_s": 3.0}
    terminal = Terminal(width=60, file=StringIO())
    terminal.show(worker_table({"per_worker": [{**worker, "bytes_sent": 5, "planned_steps": 4}]}))
    assert isinstance(terminal.file, StringIO)
    said = terminal.file.getvalue()
    for header in ("computing s", "communicating s", "waiting s", "bytes sent", "planned steps"):
        assert header in said
    assert "…" not in said
