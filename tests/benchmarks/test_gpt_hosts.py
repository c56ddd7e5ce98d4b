"""The GPT on hosts: a worker trains its part of a job, and figures are compared with DDP's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers import gpt_hosts
from benchmarks.papers.gpt import QUICK

from tests.support.small_data import write_small


@pytest.mark.processes
def test_workers_train_and_the_first_says_what_it_took(crew: Any, tmp_path: Path) -> None:
    write_small(tmp_path)
    found = {}
    for name in ("DDP", "SparseLoCo, H 32"):
        found[name], nothing = crew(2).run(gpt_hosts.work, name, replace(QUICK, steps=32), tmp_path)
        assert nothing == {} and found[name]["seconds"] > 0 and 0 < found[name]["loss"] < 6.0, "ln 256 is 5.5"
    assert found["SparseLoCo, H 32"]["bytes"] < found["DDP"]["bytes"] / 32


def test_every_contender_fits_the_steps() -> None:
    for name in gpt_hosts.NAMES:
        job = gpt_hosts.job_of(name, QUICK, gpt_hosts.HOSTS)
        assert job.steps == 64 and job.steps % getattr(job.strategy, "period", 1) == 0


def test_figures_are_those_of_a_worker_and_compared_with_ddp_s() -> None:
    ddp = {"seconds": 128.0, "bytes": 4e9, "loss": 2.0}
    ours = {"seconds": 16.0, "bytes": 1e9, "loss": 2.5}
    assert gpt_hosts.cells_of(ours, ddp, 64) == ("16.0", "0.250", "8.00", "250", "0.2500", "2.500")
    assert gpt_hosts.cells_of(ours, None, 64) == ("16.0", "0.250", "", "250", "", "2.500")
