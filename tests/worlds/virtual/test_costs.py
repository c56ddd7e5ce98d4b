"""Costs in a cluster file, and what is charged where nothing was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat import BSP, SSP, Half, Quantize
from offbeat.worlds.virtual.cluster import dump, load_cluster
from offbeat.worlds.virtual.costs import CodecCost, ShardCost
from tests.support.virtual_runs import AnyStrategy, cluster_of, play
from tests.support.virtual_servers import STEPS

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("strategy", [BSP(codec=Half()), SSP(codec=Half()), BSP()], ids=str)
def test_a_codec_that_was_not_measured_costs_nothing(strategy: AnyStrategy) -> None:
    other = CodecCost(codec=str(Quantize(bits=4)), encode_s=1e-3, decode_s=1e-3)
    plain = play(cluster_of(0.05, 0.07), strategy, STEPS)
    assert play(cluster_of(0.05, 0.07, codecs=(other,)), strategy, STEPS).history == plain.history


def test_costs_survive_a_cluster_file(tmp_path: Path) -> None:
    cost = CodecCost(codec=str(Half()), encode_s=2e-6, decode_s=3e-6)
    cluster = cluster_of(0.05, shards=ShardCost(apply_s=1e-9, beside=1.0), codecs=(cost,))
    file = tmp_path / "cluster.toml"
    file.write_text(dump(cluster))
    assert load_cluster(file) == cluster
