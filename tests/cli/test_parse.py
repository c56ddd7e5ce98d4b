"""Texts of options as the objects that they describe, and texts that are refused."""

from __future__ import annotations

import pytest

from offbeat import BSP, ErrorFeedback, LocalSGD, Quantize
from offbeat.cli.parse import strategies_of

pytestmark = pytest.mark.virtual


def test_what_stands_in_parentheses_comes_before_set() -> None:
    both = strategies_of("local_sgd,local_sgd(period=4)", ["local_sgd.period=3", "local_sgd.weighted=true"])
    assert both == [LocalSGD(period=3, weighted=True), LocalSGD(period=4, weighted=True)]
    assert strategies_of("local_sgd()", []) == [LocalSGD()]


def test_commas_inside_of_parentheses_do_not_split() -> None:
    text = "local_sgd(period=3, weighted=true),bsp(codec=ErrorFeedback(Quantize(4, stochastic=true))), bsp"
    coded = BSP(codec=ErrorFeedback(Quantize(4, stochastic=True)))
    assert strategies_of(text, []) == [LocalSGD(period=3, weighted=True), coded, BSP()]
