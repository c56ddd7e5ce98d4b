"""The parts of the chaos benchmark that need no hosts."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.command import Repeated
from benchmarks.chaos.worker import BATCH, Job
from benchmarks.support.hosts import Hosts


def job(folder: Path, strategy: str = "ssp") -> Job:
    return Job(strategy=strategy, address="10.0.0.1:1", world=8, seconds=9.0, data="", folder=str(folder))


def test_what_is_due_comes_every_so_often_and_once_after_a_pause() -> None:
    repeated = Repeated(5.0, 100.0)
    assert [repeated.due(now) for now in (104.9, 105.0, 105.1, 110.0)] == [False, True, False, True]
    assert [repeated.due(now) for now in (131.0, 131.1, 135.0)] == [True, False, True], "late, then on time"


def test_a_job_reaches_a_launcher(tmp_path: Path) -> None:
    assert Job(**json.loads(job(tmp_path).text())) == job(tmp_path)
    assert job(tmp_path, "diloco").elastic and not job(tmp_path, "oscars").elastic


def test_steps_and_losses_are_read_from_the_logs(tmp_path: Path) -> None:
    cluster = Cluster(Hosts(count=5), job(tmp_path))
    for slot in range(2):
        cluster.job.log(slot).write_text("10.0 1 2.3\n11.0 2 2.2\n12.5 3 2.1\n")
    assert cluster.steps_between(11.0, 13.0) == 4
    assert cluster.samples_per_s(11.0, 13.0) == BATCH * 2
    (tmp_path / "log").write_text(
        "offbeat server: shard 1: 3 updates of worker 0 since the last snapshot are lost (0.1 MB)\n"
        "offbeat server: shard 2: 4 updates of worker 11 since the last snapshot are lost (0.1 MB)\n"
    )
    assert cluster.lost_updates() == 7
