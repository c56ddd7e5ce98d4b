"""offbeat calibrate: what two real ranks measure is a cluster that simulate reads."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat import Half
from offbeat.worlds.virtual.cluster import Cluster, load_cluster
from offbeat.worlds.virtual.step_times import Measured
from tests.support.commands import command, summary_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("calibrated") / "deep" / "cluster.toml"
    args = ["calibrate", "digits", "--workers", "2", "--pace", "5ms", "--steps", "5", "--out", str(file)]
    args += ["--codec", "half"]
    ended = subprocess.run([sys.executable, "-m", "offbeat", *args], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "rank 1: " in ended.stdout
    assert f"written: {file}" in ended.stdout
    return file


def step_times(cluster: Cluster) -> list[Measured]:
    times = [group.step_s for group in cluster.workers]
    assert all(isinstance(each, Measured) for each in times)
    return times  # type: ignore[return-value]


def test_the_file_holds_what_was_measured(measured: Path) -> None:
    cluster = load_cluster(measured)
    assert cluster.size == 2
    assert "digits" in cluster.summary
    assert "emulated" in cluster.summary
    assert 0 < cluster.forward_share < 1
    assert 0 < cluster.update_share < 1
    assert 0 <= cluster.operation_s < math.inf  # 0: the first bytes after a pause pass at once
    for group in cluster.workers:
        assert 0 < group.up_bits_per_s == group.down_bits_per_s
    for times in step_times(cluster):
        assert len(times.measured_s) == 5
        assert min(times.measured_s) >= 0.005, "paced"
        assert len(times.ready) == 1, "all of digits is one block"
        assert 0 < times.ready[0] <= 1
    assert [cost.codec for cost in cluster.codecs] == [str(Half())]
    assert all(cost.encode_s > 0 and cost.decode_s > 0 for cost in cluster.codecs)
    assert cluster.shards is not None and cluster.shards.apply_s > 0
    # Of one rank a gradient is ready after forward, and both figures of the cluster are means of its ranks'.
    assert cluster.forward_share < statistics.mean(times.ready[0] for times in step_times(cluster))


def test_simulate_reads_it(measured: Path, tmp_path: Path) -> None:
    args = ["--cluster", measured, "--workers", 2, "--steps", 3, "--out", tmp_path]
    said = command("simulate", "digits", *args)
    assert said.code == 0, said.err
    summary = summary_of(tmp_path)
    drawn = [times.measured_s for times in step_times(load_cluster(measured))]
    for worker, seconds in zip(summary["per_worker"], drawn, strict=True):
        assert 3 * min(seconds) * (1 - 1e-9) <= worker["compute_s"] <= 3 * max(seconds) * (1 + 1e-9)


def test_a_file_that_is_there_is_kept(measured: Path) -> None:
    before = measured.read_text()
    said = command("calibrate", "digits", "--workers", 2, "--out", measured)
    assert said.code == 2
    assert "exists: choose another --out, or give --force" in said.err
    assert measured.read_text() == before


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--steps", 0], "--steps 0: at least 1 is needed"),
        (["--pace", "soon"], "write a time above 0"),
        (["--slow", "7=2"], "there is no rank 7"),
    ],
    ids=["steps", "pace", "slow"],
)
def test_a_bad_option_is_told(tmp_path: Path, args: list[object], problem: str) -> None:
    said = command("calibrate", "digits", "--workers", 2, "--out", tmp_path / "cluster.toml", *args)
    assert said.code == 2
    assert problem in said.err
