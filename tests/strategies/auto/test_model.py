"""The model by which Auto chooses, against its formulas worked out by hand."""

from __future__ import annotations

import math

import pytest

from offbeat.strategies.auto.model import BSP_PERIOD, Forecast, WindowSeconds, periods_up_to, wanted_period

GAIN, LONGEST = 0.1, 8


def measured(compute_s: float, wait_s: float, exchange_s: float) -> WindowSeconds:
    return WindowSeconds(compute_s, compute_s, wait_s, exchange_s)


def of_bsp(compute_s: float, wait_s: float, exchange_s: float) -> Forecast:
    now = measured(compute_s, wait_s, exchange_s)
    return Forecast.of(BSP_PERIOD, now, now)


def of_local(period: int, now: WindowSeconds, hidden_s: float = 0.0, waited_s: float = 4.0) -> Forecast:
    """Of LocalSGD, where BSP had hidden so much, and had waited for so long."""
    return Forecast.of(period, now, now._replace(wait_s=waited_s, exchange_s=waited_s + hidden_s))


def wanted(period: int, forecast: Forecast, longest: int = LONGEST) -> int:
    return wanted_period(period, forecast, periods_up_to(longest), GAIN)


def test_seconds_of_a_slow_network() -> None:
    forecast = of_bsp(1.0, 3.4, 4.0)  # backward hides 0.6
    assert forecast.step_s(BSP_PERIOD) == pytest.approx(4.4)
    assert [forecast.step_s(p) for p in (2, 4, 8)] == pytest.approx([3.0, 2.0, 1.5])


def test_seconds_of_workers_that_are_slow_at_times() -> None:
    forecast = of_bsp(1.0, 0.5, 0.1)  # 0.4 of waiting is no exchange
    assert forecast.step_s(BSP_PERIOD) == pytest.approx(1.5)
    assert forecast.step_s(4) == pytest.approx(1 + 0.1 / 4 + 0.4 / 2)


def test_deaths_lose_the_local_steps() -> None:
    forecast = of_bsp(1.0, 4.0, 4.0)._replace(deaths=0.1)
    assert forecast.step_s(BSP_PERIOD) == pytest.approx(5.0)
    assert forecast.step_s(8) == pytest.approx(1.5 * (1 + 0.1 * 7 / 2))


@pytest.mark.parametrize("period", [BSP_PERIOD, 2, 8])
@pytest.mark.parametrize("wait_s", [0.5, 1.0, 3.0])
def test_what_runs_is_expected_to_take_what_it_took(period: int, wait_s: float) -> None:
    now = measured(2.0, wait_s, 0.5 * max(1, period))
    forecast = of_local(period, now) if period else of_bsp(*now[:1], *now[2:4])
    assert forecast.step_s(period) == pytest.approx(2.0 + wait_s)


def test_bsp_is_expected_to_hide_what_it_hid_and_to_wait_no_longer_than_it_did() -> None:
    for exchange_s, wait_s in ((0.5, 0.0), (1.0, 0.4), (3.0, 2.4), (9.0, 4.0)):
        forecast = of_local(8, measured(1.0, exchange_s / 8, exchange_s), hidden_s=0.6)
        assert forecast.step_s(BSP_PERIOD) == pytest.approx(1.0 + wait_s)


@pytest.mark.parametrize(
    ("exchange_s", "longest", "period"),
    [(4.0, 8, 8), (4.0, 7, 4), (4.0, 64, 64), (0.3, 8, 4), (4.0, 1, BSP_PERIOD), (4.0, 2, 2)],
)
def test_the_shortest_period_that_is_within_5_percent_of_the_best(
    exchange_s: float, longest: int, period: int
) -> None:
    assert wanted(BSP_PERIOD, of_bsp(1.0, exchange_s, exchange_s), longest) == period


@pytest.mark.parametrize(
    ("wait_s", "exchange_s", "period"),
    [
        (0.0, 0.6, BSP_PERIOD),  # everything is hidden
        (0.2, 0.8, BSP_PERIOD),  # 1.1 for 1.2: too little
        (0.4, 1.0, 8),  # 1.125 for 1.4
        (0.5, 0.1, 8),  # stragglers alone: 1.15 for 1.5
    ],
)
def test_bsp_is_left_for_a_tenth_of_a_step(wait_s: float, exchange_s: float, period: int) -> None:
    assert wanted(BSP_PERIOD, of_bsp(1.0, wait_s, exchange_s)) == period


@pytest.mark.parametrize(("exchange_s", "period"), [(4.0, 8), (1.0, 8), (0.7, BSP_PERIOD), (0.1, BSP_PERIOD)])
def test_bsp_comes_back_when_it_costs_a_twentieth(exchange_s: float, period: int) -> None:
    """BSP hid 0.6: at K = 0.7 it would take 1.1, where LocalSGD takes 1.0875; at 1.0 it takes 1.4."""
    assert wanted(8, of_local(8, measured(1.0, exchange_s / 8, exchange_s), hidden_s=0.6)) == period


def test_local_steps_that_take_as_long_as_bsp_did_are_left() -> None:
    """Whatever makes them slow, and whatever the model expects of BSP."""
    slow = measured(1.0, 0.4, 1.0)
    assert wanted(8, of_local(8, slow, waited_s=4.0)) == 8
    assert wanted(8, of_local(8, slow, waited_s=0.41)) == BSP_PERIOD


def test_between_the_two_limits_nothing_changes() -> None:
    """What is not worth leaving BSP for is not worth going back for, either."""
    for exchange_s in (0.78, 0.8, 0.82):
        assert wanted(BSP_PERIOD, of_bsp(1.0, exchange_s - 0.6, exchange_s)) == BSP_PERIOD
        assert wanted(8, of_local(8, measured(1.0, exchange_s / 8, exchange_s), hidden_s=0.6)) == 8


def test_a_period_grows_for_a_tenth_and_shrinks_where_that_costs_little() -> None:
    assert wanted(2, of_local(2, measured(1.0, 2.0, 4.0))) == 8
    assert wanted(8, of_local(8, measured(1.0, 0.3 / 8, 0.3))) == 4
    assert wanted(4, of_local(4, measured(1.0, 0.3 / 4, 0.3))) == 4


def test_without_bsp_among_the_candidates_the_shortest_period_stays() -> None:
    fast = of_local(8, measured(1.0, 0.01 / 8, 0.01))
    assert wanted_period(8, fast, [2, 4, 8], GAIN) == 2


def test_what_no_worker_has_measured_is_not_known() -> None:
    assert not measured(math.inf, 0.0, 0.0).known
    assert measured(1.0, 0.0, 0.0).known
