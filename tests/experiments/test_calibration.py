"""Calibration: what is measured becomes a cluster, and timing leaves the model as a loop would train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.core.toml import read_toml
from offbeat.experiments import calibration
from offbeat.experiments.calibration import (
    SIZES_BYTES,
    SMALL_BYTES,
    USUAL_QUEUE_S,
    WARM_UP,
    LinkTimes,
    StepTimes,
    cluster_of,
    time_links,
    time_steps,
)
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.virtual.cluster import Cluster, dump, load_cluster
from offbeat.worlds.virtual.step_times import Measured
from tests.support.crew import Crew
from tests.support.exchanges import process_port
from tests.support.limits import HANG_S
from tests.support.lost import patched

pytestmark = pytest.mark.processes

LINKS = LinkTimes(
    bits_per_s=1e9,
    operation_s=0.001,
    least_reduce_s=0.003,
    least_exchange_s=0.002,
    least_control_s=0.0005,
)


def test_measured_ranks_become_a_cluster() -> None:
    ranks = [StepTimes([0.1, 0.2], 0.25, 0.125, [0.5, 0.875]), StepTimes([0.4], 0.75, 0.375, [0.625])]
    cluster = cluster_of("mine", ranks, LINKS)
    assert [group.step_s for group in cluster.workers] == [
        Measured(measured_s=(0.1, 0.2), ready=(0.5, 0.875)),
        Measured(measured_s=(0.4,), ready=(0.625,)),
    ]
    assert (cluster.forward_share, cluster.update_share) == (0.5, 0.25), "the medians of the ranks"
    assert {group.up_bits_per_s for group in cluster.workers} == {1e9}
    assert cluster.queue_s == USUAL_QUEUE_S > 0, "not measured"
    assert cluster_of("mine", ranks, replace(LINKS, queue_s=0.02)).queue_s == 0.02
    assert (cluster.operation_s, cluster.least_reduce_s, cluster.least_exchange_s) == (0.001, 0.003, 0.002)
    assert cluster.least_control_s == 0.0005
    assert cluster.all_reduces_by == "ring"
    assert cluster_of("on GPUs", ranks, replace(LINKS, backend="nccl")).all_reduces_by == "best"
    assert cluster_of("one", ranks[:1], LINKS).queue_s == 0, "it has no links"
    assert read_toml(Cluster, dump(cluster), "dumped") == cluster


def test_a_timed_loop_takes_the_steps_of_training() -> None:
    chosen = task("digits")
    torch.manual_seed(0)
    model, data = chosen.build(), chosen.load()
    before = [param.clone() for param in model.parameters()]
    times = time_steps(chosen, data, model, rank=0, world=2, steps=4)
    assert len(times.seconds) == 4 and min(times.seconds) > 0, "without the steps to warm up"
    assert 0 < times.forward_share < 1 and 0 < times.update_share < 1
    assert times.ready == sorted(times.ready) and 0 < times.ready[-1] <= 1 - times.update_share
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters()), "no hook is left"
    assert WARM_UP > 0


@pytest.mark.parametrize(
    ("fixed_s", "small_s", "operation_s"), [(0.002, 0.01, 0.002), (0.02, 0.01, 0.01), (-0.001, 0.01, 0.0)]
)
def test_two_sizes_give_the_rate_and_the_fixed_cost(
    monkeypatch: pytest.MonkeyPatch, fixed_s: float, small_s: float, operation_s: float
) -> None:
    """On a ring of 4 at 100 MB/s each NIC sends 1.5 times the bytes; a small message bounds the cost."""

    def took(port: object, like: object, nbytes: int) -> float:
        return fixed_s + 1.5 * nbytes / 100e6 if nbytes in SIZES_BYTES else small_s * nbytes / SMALL_BYTES

    monkeypatch.setattr(calibration, "time_reduce", took)
    monkeypatch.setattr(calibration, "time_gather", lambda port, like, nbytes: 0.004)
    port = type("Four", (), {"world": 4, "backend": lambda port, device: "nccl"})()
    links = time_links(port, torch.zeros(1))
    assert links.backend == "nccl"
    assert (links.least_reduce_s, links.least_exchange_s) == (small_s, 0.004)
    assert links.least_control_s == small_s * 4 / SMALL_BYTES
    assert links.bits_per_s == pytest.approx(800e6)
    assert links.operation_s == pytest.approx(operation_s, abs=1e-12)


def _queued(out: Path, patch: pytest.MonkeyPatch) -> None:
    """Calibrate where ranks 0 and 1 find queues of 0.02 and 0.06 s, and rank 2 none."""

    def queue_s(port: ProcessPort, *others: Any) -> float | None:
        return [0.02, 0.06, None][port.rank]

    patch.setattr(calibration, "time_queue", queue_s)
    calibration.measure(task("digits"), RunOptions(timeout_s=HANG_S), 2, out, lambda text: None)


def test_the_cluster_file_has_the_queues_that_ranks_found(
    crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    crew(3).run(patched, _queued, tmp_path / "cluster.toml")
    assert load_cluster(tmp_path / "cluster.toml").queue_s == pytest.approx(0.04), "the median"


def _timed() -> LinkTimes:
    with process_port() as port, torch.no_grad():
        return time_links(port, torch.zeros(1))


def test_real_links_have_a_rate_and_a_cost(crew: Callable[[int], Crew]) -> None:
    for links in crew(2).run(_timed):
        assert links.bits_per_s > 0 and links.least_reduce_s >= links.operation_s >= 0
        assert links.least_exchange_s > 0 and links.backend == "gloo"
