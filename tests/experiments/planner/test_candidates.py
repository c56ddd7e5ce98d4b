"""The candidates of `offbeat plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.cli.parse import names_of
from offbeat.errors import SettingError
from offbeat.experiments.planner.candidates import CANDIDATES, candidates
from offbeat.experiments.planner.ranking import label_of
from offbeat.strategies import STRATEGIES
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
