"""The candidates of `offbeat plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offbeat import BSP
from offbeat.cli.parse import names_of
from offbeat.codecs import codec as parse_codec
from offbeat.errors import SettingError
from offbeat.experiments.planner.candidates import CANDIDATES, candidates, codecs_of, untimed
from offbeat.experiments.planner.ranking import label_of
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import Cluster, Workers
from offbeat.worlds.virtual.costs import CodecCost, ShardCost
from tests.support.plugins import offer, searching


def test_the_table_of_candidates_has_every_strategy_and_nothing_twice() -> None:
    assert CANDIDATES[0] == STRATEGIES["bsp"]()
    assert {candidate.name for candidate in CANDIDATES} == set(STRATEGIES)
    assert len(set(map(label_of, CANDIDATES))) == len(CANDIDATES)
    assert candidates() == CANDIDATES
    some = candidates(names_of("ssp, local_sgd"))
    assert some[0] == CANDIDATES[0]
    assert {candidate.name for candidate in some} == {"bsp", "local_sgd", "ssp"}
    assert sum(candidate.name == "bsp" for candidate in some) == 1
    assert len(candidates(["bsp"])) == 5, "with its codecs"
    for names, problem in (("ssp,ssp", "each name once"), ("spp", "did you mean 'ssp'?")):
        with pytest.raises(SettingError) as told:
            candidates(names_of(names))
        assert problem in str(told.value)


def test_a_quorum_is_a_fraction_of_the_workers() -> None:
    for workers, quorum in ((4, 3), (2, 2), (1, 1), (1000, 750)):
        on_server = [c for c in candidates(["diloco"], workers) if c.settings().get("on") == "server"]
        assert [c.settings()["quorum"] for c in on_server] == [quorum]


def test_every_kind_of_diloco_is_tried() -> None:
    of_diloco = [c.settings() for c in candidates(["diloco"])[1:]]
    for name, value in (("eager", True), ("on", "server"), ("average", 0.7), ("delay", 2), ("fragments", 4)):
        assert any(settings[name] == value for settings in of_diloco), name


def test_codecs_are_those_of_the_candidates_each_once() -> None:
    assert [str(codec) for codec in codecs_of(candidates(["local_sgd", "diloco"]))] == [
        "error_feedback(quantize(4))"
    ]
    codecs = [str(codec) for codec in codecs_of(CANDIDATES)]
    assert len(codecs) == len(set(codecs)) == 12, "five, and the seven ratios of GDTopK"
    assert [str(parse_codec(text)) for text in codecs] == codecs, "as `calibrate --codec` reads them"


def test_what_has_no_times_is_named() -> None:
    bare = Cluster(workers=(Workers(step_s=0.1, up_bits_per_s=1e9, down_bits_per_s=1e9),))
    costs = tuple(CodecCost(codec=str(codec)) for codec in codecs_of(CANDIDATES))
    measured = replace(bare, codecs=costs, shards=ShardCost())
    assert untimed(CANDIDATES, bare) == "codecs and servers"
    assert untimed(CANDIDATES, replace(measured, shards=None)) == "servers"
    assert untimed(CANDIDATES, replace(measured, codecs=costs[1:])) == "codecs"
    assert untimed(CANDIDATES, measured) == untimed([BSP()], bare) == ""


def test_plugins_come_last_with_their_defaults(tmp_path: Path) -> None:
    module = "from offbeat import LocalSGD as Odd\nclass Mine(Odd):\n    name = 'mine'"
    offers = {"mine": "mine_and_odd:Mine", "odd": "mine_and_odd:Odd"}
    offer(tmp_path, "mine-and-odd", "offbeat.strategies", offers, module)
    with searching(STRATEGIES, tmp_path):
        mine = STRATEGIES["mine"]()
        assert candidates() == (*CANDIDATES, mine)
        assert candidates(["mine"]) == (CANDIDATES[0], mine)
        with pytest.raises(SettingError, match=r"'odd' of mine-and-odd 1.0 .*give both the same name"):
            candidates(["odd"])
