"""The candidates of `offbeat plan`."""

from __future__ import annotations

import pytest

from offbeat.cli.parse import names_of
from offbeat.errors import SettingError
from offbeat.experiments.planner.candidates import CANDIDATES, candidates
from offbeat.experiments.planner.ranking import label_of
from offbeat.strategies import STRATEGIES


def test_the_table_of_candidates_has_every_strategy_and_nothing_twice() -> None:
    assert CANDIDATES[0] == STRATEGIES["bsp"]()
    assert {candidate.name for candidate in CANDIDATES} == set(STRATEGIES)
    assert len(set(map(label_of, CANDIDATES))) == len(CANDIDATES)
    assert candidates() == CANDIDATES
    some = candidates(names_of("ssp, local_sgd"))
    assert some[0] == CANDIDATES[0]
    assert {candidate.name for candidate in some} == {"bsp", "local_sgd", "ssp"}
    assert sum(candidate.name == "bsp" for candidate in some) == 1
    assert len(candidates(["bsp"])) == 3, "with its codecs"
    for names, problem in (("ssp,ssp", "each name once"), ("spp", "did you mean 'ssp'?")):
        with pytest.raises(SettingError) as told:
            candidates(names_of(names))
        assert problem in str(told.value)
