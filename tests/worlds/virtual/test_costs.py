"""Costs in a cluster file, and what is charged where nothing was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat import BSP, GSSP, SSP, ErrorFeedback, Half, Quantize
from offbeat.strategies.gssp.gdtopk import GDTopK
from offbeat.worlds.virtual.cluster import dump, load_cluster
from offbeat.worlds.virtual.costs import FREE, CodecCost, ShardCost, push_costs
from tests.support.virtual_runs import AnyStrategy, cluster_of, play
from tests.support.virtual_servers import STEPS

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("strategy", [BSP(codec=Half()), SSP(codec=Half()), BSP()], ids=str)
def test_a_codec_that_was_not_measured_costs_nothing(strategy: AnyStrategy) -> None:
    other = CodecCost(codec=str(Quantize(bits=4)), encode_s=1e-3, decode_s=1e-3)
    plain = play(cluster_of(0.05, 0.07), strategy, STEPS)
    assert play(cluster_of(0.05, 0.07, codecs=(other,)), strategy, STEPS).history == plain.history


def test_each_ratio_of_gdtopk_has_its_own_cost() -> None:
    strategy = GSSP(sparse=GDTopK(epoch_steps=4))
    codecs = strategy.server_half().push_codecs
    costs = tuple(CodecCost(codec=str(codec), encode_s=1e-9 * n) for n, codec in enumerate(codecs[1:], 1))
    assert push_costs(costs, strategy) == (FREE, *costs)
    with_memory = CodecCost(codec=str(ErrorFeedback(Half())), encode_s=1.0)
    assert push_costs((with_memory,), SSP(codec=ErrorFeedback(Half()))) == (with_memory,)
    assert push_costs(costs, BSP()) == ()


def test_costs_survive_a_cluster_file(tmp_path: Path) -> None:
    cost = CodecCost(codec=str(Half()), encode_s=2e-6, decode_s=3e-6)
    cluster = cluster_of(0.05, shards=ShardCost(apply_s=1e-9, beside=1.0), codecs=(cost,))
    file = tmp_path / "cluster.toml"
    file.write_text(dump(cluster))
    assert load_cluster(file) == cluster
