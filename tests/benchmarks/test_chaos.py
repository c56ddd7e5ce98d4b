"""The parts of the chaos benchmark that need no hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.command import COLUMNS, row
from benchmarks.chaos.job import BATCH, Event, Events, Job
from benchmarks.chaos.phases import pauses, returns
from benchmarks.chaos.run import Repeated
from benchmarks.support import raw
from benchmarks.support.hosts import Hosts


def job(folder: Path, strategy: str = "ssp") -> Job:
    return Job(strategy=strategy, address="10.0.0.1:1", data="", folder=str(folder))


def test_what_is_due_comes_every_so_often_and_once_after_a_pause() -> None:
    repeated = Repeated(5.0, 100.0)
    assert [repeated.due(now) for now in (104.9, 105.0, 105.1, 110.0)] == [False, True, False, True]
    assert [repeated.due(now) for now in (131.0, 131.1, 135.0)] == [True, False, True], "late, then on time"


def test_a_job_reaches_a_launcher(tmp_path: Path) -> None:
    assert Job(**json.loads(job(tmp_path).text())) == job(tmp_path)
    assert job(tmp_path, "diloco").elastic and job(tmp_path, "oscars").served
    assert job(tmp_path, "torchft_diloco").peer


def test_events_are_read_as_the_logs_grow_and_only_whole_lines(tmp_path: Path) -> None:
    own = job(tmp_path)
    events = Events(own)
    own.log(0).write_text("10.0 step 1\n11.0 step 2\n12.")
    own.log(1).write_text("11.5 killed 0\n")
    events.update()
    own.log(0).write_text("10.0 step 1\n11.0 step 2\n12.5 step 3\n")
    events.update()
    assert events.steps == 3
    assert events.latest_step(0) == Event(12.5, "step", 3) and events.latest_step(1).at_s == 0.0
    assert events.samples_per_s(11.0, 13.0) == BATCH


def test_lost_updates_are_read_from_what_the_shards_say(tmp_path: Path) -> None:
    cluster = Cluster(Hosts(count=5), job(tmp_path))
    (tmp_path / "log").write_text(
        "offbeat server: shard 1: 3 updates of worker 0 since the last snapshot are lost (0.1 MB)\n"
        "offbeat server: shard 2: 4 updates of worker 11 since the last snapshot are lost (0.1 MB)\n"
    )
    assert cluster.lost_updates() == 7


def life(*parts: tuple[float, str]) -> list[Event]:
    return [Event(at_s, name) for at_s, name in parts]


def test_phases_of_a_return_are_counted_from_the_kill() -> None:
    """The second kill comes before the first return is complete: only what it reached counts."""
    events = {
        0: life(
            (1.0, "step"), (5.0, "killed"), (5.1, "started"), (5.5, "admitted"), (6.0, "step"), (7.0, "step")
        ),
        1: life((1.0, "killed"), (1.3, "started"), (2.0, "killed"), (2.5, "started")),
    }
    found = returns(events)
    assert found["started"] == pytest.approx([0.1, 0.3, 0.5])
    assert found["admitted"] == pytest.approx([0.5]) and found["step"] == pytest.approx([1.0])


def test_pause_of_the_others_is_the_median_longest_step_beyond_the_usual_one() -> None:
    steady = life(*((float(at_s), "step") for at_s in range(20)))
    late = life(*((float(at_s), "step") for at_s in (*range(6), *range(9, 20))))  # no step from 5 to 9
    killed = life((1.0, "step"), (5.5, "killed"), (5.6, "started"), (9.0, "step"))
    events = {0: late, 1: late, 2: steady, 3: killed}
    assert pauses(events, [5.5], 4.0) == [3.0]
    assert pauses(events, [12.5], 4.0) == [0.0]


def test_row_of_a_run_that_failed_has_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "RESULTS", tmp_path)
    kept = raw.RawResults("chaos")
    assert kept.get("torchft_diloco rough") is None
    kept.keep("torchft_diloco rough", {"seconds": 9.0, "error": "no quorum"})
    assert kept.get("torchft_diloco rough")["error"] == "no quorum"
    cells = row("torchft_diloco", {"samples_per_s": 100.0}, kept.get("torchft_diloco rough"))
    assert cells[:3] == ["torchft_diloco", "100", "no quorum"] and len(cells) == len(COLUMNS)
