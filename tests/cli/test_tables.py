"""The tables that commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import compare, read_summary

pytestmark = pytest.mark.virtual


def test_the_table_shows_mean_and_spread_and_what_never_came(tmp_path: Path) -> None:
    said = compare(tmp_path, "--seeds", "0,1,2", "--target", -1.0)
    table = said.out[said.out.rindex("strategy") :]
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("bsp", "local_sgd")] == ["bsp", "local_sgd"]
    assert table.count("never") == 4, "seconds and bytes of two strategies"
    values = [run["value"] for run in read_summary(tmp_path) if run["strategy"] == "bsp"]
    mean = sum(values) / 3
    spread = (sum((v - mean) ** 2 for v in values) / 2) ** 0.5
    assert f"{mean:.4f}" in rows[1]
    assert f"{spread:.4f}" in rows[2]
    assert all(run["seconds_to_target"] is run["bytes_to_target"] is None for run in read_summary(tmp_path))
