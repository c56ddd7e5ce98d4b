"""Settings: from what a user types to an object, or an error that names the nearest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from offbeat import BSP, LocalSGD, SelSync, SettingError, TopK
from offbeat.core.fields import Flag, NoneOr, Number, Whole
from offbeat.core.settings import (
    Settings,
    build,
    lookup,
    non_defaults,
    parse_pairs,
    parse_value,
    without_refused,
)
from offbeat.strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class Many(Settings):
    whole: int = 1
    real: float = 0.5
    flag: bool = False
    word: str = ""
    maybe: int | None = None
    either: float | str = "auto"


def test_pick() -> None:
    assert lookup("strategy", "local_sgd", STRATEGIES) is LocalSGD
    with pytest.raises(SettingError, match=r"unknown strategy 'localsgd'; did you mean 'local_sgd'\?"):
        lookup("strategy", "localsgd", STRATEGIES)
    with pytest.raises(SettingError, match=f"unknown strategy 'qqqq'; known: {', '.join(STRATEGIES)}"):
        lookup("strategy", "qqqq", STRATEGIES)
    with pytest.raises(SettingError, match="there are none"):
        lookup("strategy", "bsp", {})


def test_build() -> None:
    assert build(LocalSGD, {"period": "16", "weighted": "true"}) == LocalSGD(period=16, weighted=True)
    assert build(LocalSGD, {"period": 16}) == LocalSGD(period=16)
    assert build(BSP, {}) == BSP()
    assert build(Many, {"whole": "-3", "real": "1e-3", "maybe": "none"}) == Many(whole=-3, real=1e-3)
    assert build(Many, {"maybe": "4", "either": "0.2"}) == Many(maybe=4, either=0.2)
    assert build(Many, {"either": "auto", "word": "7"}) == Many(word="7")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"perod": "8"}, r"local_sgd has no setting 'perod'; did you mean 'period'\?"),
        ({"qqqq": "8"}, "local_sgd has no setting 'qqqq'; known: codec, period, weighted"),
        ({"period": "many"}, "period='many': a whole number of steps, at least 1"),
        ({"period": "2.5"}, "period='2.5': a whole number of steps, at least 1"),
        ({"weighted": "perhaps"}, "weighted='perhaps': True or False"),
        ({"weighted": "no"}, "weighted='no': True or False"),
        ({"period": "0"}, "period=0"),
        ({"period": -1}, "period=-1"),
    ],
)
def test_build_says_what_is_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        build(LocalSGD, settings)


def test_a_setting_of_another_strategy() -> None:
    with pytest.raises(SettingError, match="bsp has no setting 'period'; known: codec"):
        build(BSP, {"period": "4"})


@pytest.mark.parametrize("period", [2.5, "4", None])
def test_a_period_is_a_whole_number(period: Any) -> None:
    with pytest.raises(SettingError, match="period="):
        LocalSGD(period=period)


def test_read_leaves_values_alone() -> None:
    assert parse_value("real", 3, Number()) == 3
    assert parse_value("flag", "False", Flag()) is False
    with pytest.raises(SettingError, match="maybe='x': a whole number, or None"):
        parse_value("maybe", "x", NoneOr(other=Whole()))


def test_parse() -> None:
    assert parse_pairs(["period=8", " inner-steps = 4", "name=a=b"]) == {
        "period": "8",
        "inner_steps": "4",
        "name": "a=b",
    }
    for wrong in ("period", "=8", ""):
        with pytest.raises(SettingError, match="key=value"):
            parse_pairs([wrong])


def test_only_refused_settings_are_left_out() -> None:
    assert without_refused(SelSync, {"codec": None, "smoothing": None}) == {"smoothing": None}
    assert without_refused(BSP, {"codec": None}) == {"codec": None}
    assert non_defaults(SelSync, {"codec": None, "delta": 0.1, "late": False}) == {"delta": 0.1}


def test_settings_of_others_need_no_declarations() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Theirs(Settings):
        steps: int
        anything: Nowhere = None  # type: ignore[name-defined]  # noqa: F821

    assert Theirs(steps=1, anything=[1]).settings() == {"steps": 1, "anything": [1]}
    with pytest.raises(SettingError, match="steps=True: a whole number"):
        Theirs(steps=True)


def test_setting_without_a_default_is_asked_for() -> None:
    with pytest.raises(SettingError, match="topk needs ratio: a fraction of the entries"):
        build(TopK, {"sampled": "true"})


def test_settings_without_names_are_refused_with_the_call_that_was_meant() -> None:
    with pytest.raises(SettingError, match=r"LocalSGD\(8\): say what .* LocalSGD\(period=8\)"):
        LocalSGD(8)  # type: ignore[misc]
    with pytest.raises(SettingError, match=r"Many\(0\.5, True\): .* Many\(real=0\.5, flag=True\)"):
        Many(0.5, True)  # type: ignore[misc]
    with pytest.raises(SettingError, match=r"BSP\(8\): .* BSP\(NAME=VALUE\)"):
        BSP(8)  # type: ignore[misc]
    assert TopK(0.5) == TopK(ratio=0.5), "the first setting of a codec needs no name"
