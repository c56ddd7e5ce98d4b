"""The candidates of `offbeat plan`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from offbeat import BSP, OSP, SSDSGD, ErrorFeedback, LocalSGD, Oscars, Quantize, SelSync
from offbeat.cli.parse import names_of
from offbeat.codecs import codec as parse_codec
from offbeat.core.settings import non_defaults, schema
from offbeat.errors import SettingError
from offbeat.experiments.planner.candidates import CANDIDATES, LEFT_OUT, candidates, codecs_of, untimed
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


def varied(name: str) -> set[str]:
    """Return the settings of a strategy that some candidate has other than by default."""
    cls = STRATEGIES[name]
    return {setting for c in CANDIDATES if c.name == name for setting in non_defaults(cls, c.settings())}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_setting_is_tried_or_left_out_for_a_reason(name: str) -> None:
    declared = {field.name for field in fields(STRATEGIES[name])}
    left_out = LEFT_OUT.get(name, {})
    assert declared == set(schema(STRATEGIES[name])), "every field of a strategy is a setting"
    assert declared - varied(name) - set(left_out) == set(), (
        "try it in CANDIDATES, or say in LEFT_OUT why not"
    )
    assert varied(name) & set(left_out) == set(), "tried, so LEFT_OUT is out of date"
    assert set(left_out) <= declared, "no setting of this strategy"
    assert all(len(reason.split()) > 2 for reason in left_out.values())


def test_settings_are_left_out_of_known_strategies() -> None:
    assert set(LEFT_OUT) <= set(STRATEGIES)


def test_what_measured_well_is_tried() -> None:
    for wanted in (
        Oscars(busy=0.5),
        Oscars(busy=0.8),
        SelSync(delta=0.12, period=8),
        OSP(growth=20, on="server"),
        SSDSGD(on="server"),
        LocalSGD(period=32, codec=ErrorFeedback(Quantize(8))),
        LocalSGD(period=8, first_moments=24, second_moments=48),
    ):
        assert wanted in CANDIDATES, label_of(wanted)
    assert (
        len({c.settings()["period"] for c in candidates(["sparse_loco"])[1:] if c.name == "sparse_loco"}) > 1
    )
    assert any(c.settings()["codec"] for c in CANDIDATES if c.name in ("asp", "ssp"))


def test_codecs_are_those_of_the_candidates_each_once() -> None:
    assert [str(codec) for codec in codecs_of(candidates(["local_sgd", "diloco"]))] == [
        "error_feedback(quantize(4))",
        "error_feedback(quantize(8))",
    ]
    codecs = [str(codec) for codec in codecs_of(CANDIDATES)]
    assert len(codecs) == len(set(codecs)) == 15, "eight, and the seven ratios of GDTopK"
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
