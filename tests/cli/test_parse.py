"""Texts of options as the objects that they describe, and texts that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat import BSP, ErrorFeedback, LocalSGD, Quantize
from offbeat.cli.options import Emulated, Model
from offbeat.cli.parse import (
    emulation_of,
    fractions_of,
    names_of,
    out_of,
    seeds_of,
    strategies_of,
    strategy_of,
    task_of,
)
from offbeat.errors import SettingError
from offbeat.worlds.processes.emulation import Emulation

pytestmark = pytest.mark.virtual


def test_what_stands_in_parentheses_comes_before_set() -> None:
    both = strategies_of("local_sgd,local_sgd(period=4)", ["local_sgd.period=3", "local_sgd.weighted=true"])
    assert both == [LocalSGD(period=3, weighted=True), LocalSGD(period=4, weighted=True)]
    assert strategies_of("local_sgd()", []) == [LocalSGD()]


def test_commas_inside_of_parentheses_do_not_split() -> None:
    text = "local_sgd(period=3, weighted=true),bsp(codec=ErrorFeedback(Quantize(4, stochastic=true))), bsp"
    coded = BSP(codec=ErrorFeedback(Quantize(4, stochastic=True)))
    assert strategies_of(text, []) == [LocalSGD(period=3, weighted=True), coded, BSP()]


def test_texts_become_what_they_describe(tmp_path: Path) -> None:
    assert strategy_of("local_sgd", ["period=8"]) == LocalSGD(period=8)
    assert names_of("local_sgd, ssp") == ["local_sgd", "ssp"] and names_of(None) is None
    assert seeds_of("2,0,1") == [2, 0, 1]
    assert fractions_of("0.5,0.25") == (0.5, 0.25) and fractions_of(None) is None
    emulated = Emulated(bandwidth="200mbit", pace="10ms", slow=["1=3.0", "0=2"])
    assert emulation_of(emulated, 2) == Emulation(bandwidth="200mbit", pace_s=0.01, slow={1: 3.0, 0: 2.0})
    assert emulation_of(Emulated(), 2) == Emulation()
    chosen = task_of("digits", Model(lr=0.5))
    assert (chosen.lr, chosen.batch_size, chosen.model) == (0.5, 16, "cnn"), "the rest are the task's"
    assert out_of(tmp_path, "train") == tmp_path
    assert out_of(None, "train", "digits").parent == Path("runs")
    assert out_of(None, "train", "digits").name.startswith("train-digits-2")
    own = out_of(None, "../folder/mine.py:build", "bsp")
    assert own.parent == Path("runs") and own.name.startswith("folder-mine.py-build-bsp-2")


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (lambda text: strategy_of("local_sgd", [text]), "period", "--set 'period' is not a setting"),
        (lambda text: strategies_of(text, []), "bsp,bsp", "bsp is listed twice with the same settings"),
        (lambda text: strategies_of(text, []), "local_sgd(4)", "write settings as key=value"),
        (lambda text: strategies_of("bsp", [text]), "ssp.staleness=1", "write it as name.key=value"),
        (names_of, "ssp,ssp", "each name once"),
        (seeds_of, "0,x", "--seeds '0,x': write whole numbers"),
        (seeds_of, "1,1", "each seed once, or the same run would count twice"),
        (fractions_of, "0.5", "--inject '0.5': write two fractions"),
        (lambda text: emulation_of(Emulated(slow=[text]), 2), "1=0.5", "a factor of at least 1"),
        (lambda text: emulation_of(Emulated(slow=[text]), 2), "2=4", "there is no rank 2 among 2 workers"),
        (lambda text: emulation_of(Emulated(pace=text), 2), "soon", "--pace 'soon'"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_option(
    parse: Callable[[str], Any], text: str, problem: str
) -> None:
    with pytest.raises(SettingError) as refused:
        parse(text)
    assert problem in str(refused.value)


@pytest.mark.parametrize("rate", ["50", "2.5", " 100 "])
def test_a_bandwidth_of_a_few_bits_is_refused_with_what_was_meant(rate: str) -> None:
    with pytest.raises(
        SettingError, match=rf"--bandwidth .*Did you mean {rate.strip()}mbit\? Write {rate.strip()}bit"
    ):
        emulation_of(Emulated(bandwidth=rate), 2)


@pytest.mark.parametrize("rate", ["50mbit", "50bit", "1e9", "1000000000"])
def test_a_bandwidth_with_a_unit_or_of_megabits_is_taken(rate: str) -> None:
    assert emulation_of(Emulated(bandwidth=rate), 2).bandwidth == rate
