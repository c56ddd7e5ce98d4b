"""Outages in cluster files: read, written, kept with their ranks, and refused where they overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.errors import SettingError
from offbeat.worlds.virtual.cluster import Absence, Hang, dump, load_cluster

OUTAGES = """
[[away]]
worker = 0
from_s = 1

[[hung]]
worker = 1
from_s = 2
until_s = 3

[[cut_off]]
workers = [0, 2]
from_s = 4
until_s = 5

[elastic]
silence_s = 2
"""


def test_outages_of_all_kinds_are_read_written_and_kept_with_their_ranks(tmp_path: Path) -> None:
    lasting = OUTAGES.replace("from_s = 1\n", "from_s = 1\nuntil_s = 4\n")
    file = tmp_path / "cluster.toml"
    file.write_text('[[workers]]\ncount = 3\nstep_s = 1\nup = "1gbit"\ndown = "1gbit"\n' + lasting)
    cluster = load_cluster(file)
    assert [outage.word for outage in cluster.outages(0)] == ["away", "cut off"]
    assert (cluster.elastic.silence_s, cluster.elastic.death_s) == (2.0, 0.05)
    file.write_text(dump(cluster))
    assert load_cluster(file) == cluster
    two = cluster.for_workers(2)
    assert (two.cut_off[0].workers, len(two.hung), len(two.away)) == ((0,), 1, 1)
    assert cluster.for_workers(1).hung == ()
    file.write_text(file.read_text().replace("[0, 2]", "[0, 3]"))
    with pytest.raises(SettingError, match="expected below 3"):
        load_cluster(file)


def test_outages_of_different_kinds_may_not_overlap() -> None:
    away, hung = Absence(worker=0, from_s=1.0), Hang(worker=0, from_s=2.0)
    with pytest.raises(SettingError, match=r"hung\[0\]: worker 0 is away already at 2"):
        replace(load_cluster("lan-1g"), away=(away,), hung=(hung,))
