"""Threads follow the cores that a process may use, not those of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offbeat.worlds.processes.cores import usable_cores
from offbeat.worlds.processes.launcher import threads_for


@pytest.fixture
def eight_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def test_a_pinned_process_shares_the_cores_it_is_pinned_to(
    eight_of_many: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert usable_cores(Path("no such file")) == 8
    monkeypatch.setattr("offbeat.worlds.processes.launcher.usable_cores", lambda: usable_cores(Path("none")))
    assert [threads_for(workers) for workers in (1, 4, 8, 100)] == [8, 2, 1, 1]


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("400000 100000", 4),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("max 100000", 8),
        ("1600000 100000", 8),
    ],
)
def test_a_container_s_limit_counts(eight_of_many: None, tmp_path: Path, limit: str, cores: int) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(f"{limit}\n")
    assert usable_cores(quota) == cores


def test_without_affinity_the_machine_s_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_cores(Path("no such file")) == 12
