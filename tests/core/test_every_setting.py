"""Every setting of strategies, codecs, tasks and jobs: wrong values are refused by name, others come back."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from offbeat import BSP, ErrorFeedback, GDTopK, Half, SettingError, TopK
from offbeat.codecs import CODECS, Codec, CodecField, codec
from offbeat.core.fields import Choice, Field, FirstOf, Flag, Instance, ListOf, NoneOr, Number, Text, Whole
from offbeat.core.settings import Settings, build, non_defaults, schema
from offbeat.core.strategy import Strategy
from offbeat.core.toml import read_toml, write_toml
from offbeat.experiments.job import Job
from offbeat.experiments.planner.plan_file import Plan
from offbeat.experiments.tasks import TASKS
from offbeat.experiments.tasks.digits import Digits
from offbeat.strategies import STRATEGIES

REQUIRED: dict[type[Settings], dict[str, Any]] = {
    CODECS["topk"]: {"ratio": 0.1},
    CODECS["randomk"]: {"ratio": 0.1},
    CODECS["error_feedback"]: {"codec": Half()},
    Job: {"task": Digits(), "strategy": BSP(), "workers": 2},
}
BUILT_FROM_TEXTS: list[type[Settings]] = [*STRATEGIES.values(), *CODECS.values(), GDTopK, *TASKS.values()]
CLASSES: list[type[Settings]] = [*BUILT_FROM_TEXTS, Job]
EVERY_SETTING = [(cls, name) for cls in CLASSES for name in schema(cls)]
FROM_TEXTS = [(cls, name) for cls, name in EVERY_SETTING if cls in BUILT_FROM_TEXTS]

WRONG: dict[type[Field], list[Any]] = {
    Whole: [True, False, "no", "x", "3", math.nan, math.inf, -math.inf, 2.5, 2.0, -(1 << 70), [1], (1,), {}],
    Number: [True, False, "no", "x", "0.5", math.nan, math.inf, -math.inf, -1, 10**400, [0.5], (0.5,), {}],
    Flag: ["no", "x", "true", "", 0, 1, math.nan, math.inf, -1, [True], {}],
    Choice: [True, False, "no", "x", "", 3, math.nan, math.inf, -1, ["x"], {}],
    Text: [True, False, 3, math.nan, math.inf, -1, ["x"], {}, "x"],
    Instance: [True, "no", "x", math.nan, math.inf, -1, [Half()], {}, object()],
    ListOf: [True, "no", "x", math.nan, math.inf, -1, [0.5], [0.5] * 3, (0.5, "x"), (0.5, True), {}],
    FirstOf: [True, False, "no", "x", math.nan, math.inf, -1, [0.5], {}],
}
WRONG[CodecField] = [*WRONG[Instance], GDTopK()]
TEXTS: dict[type[Field], list[str]] = {
    Whole: ["true", "no", "x", "nan", "inf", "2.5", "-1", "[1]", ""],
    Number: ["true", "no", "x", "nan", "inf", "-1", "[0.5]", ""],
    Flag: ["no", "yes", "x", "1", "0", "nan", "[true]", ""],
    Choice: ["true", "no", "x", "3", "nan", "none", ""],
    Text: ["x"],
    Instance: ["true", "no", "x", "3", "nan", "-1", "[half]", "topk(true)", "topk(", "topk(half)", ""],
    FirstOf: ["true", "no", "x", "nan", "inf", "-1", "[0.5]", ""],
}
TEXTS[CodecField] = TEXTS[Instance]
ALLOWED: list[tuple[str, Any]] = [
    ("delta", math.inf),  # SelSync: never after the window
    ("delta", "inf"),
    ("correction", "none"),  # OSP
    ("offload", "none"),  # DiLoCo
    ("bits", "none"),  # TopK, SparseLoCo
    ("target", -1),
    ("outlier_cosine", -1),  # DiLoCo: a limit that nothing exceeds
    ("outlier_cosine", "-1"),
]


def kind_of(cls: type[Settings], name: str) -> Field:
    kind = schema(cls)[name].field
    return kind.other if isinstance(kind, NoneOr) else kind


def refuses(name: str, make: Any) -> None:
    with pytest.raises(SettingError) as refusal:
        make()
    assert name in str(refusal.value)


@pytest.mark.parametrize(("cls", "name"), EVERY_SETTING, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_value_is_refused_by_name(cls: type[Settings], name: str) -> None:
    optional = isinstance(schema(cls)[name].field, NoneOr)
    for value in [*WRONG[type(kind_of(cls, name))], *([] if optional else [None])]:
        if (name, value) not in ALLOWED:
            given = {**REQUIRED.get(cls, {}), name: value}
            refuses(name, lambda given=given: cls(**given))


@pytest.mark.parametrize(("cls", "name"), FROM_TEXTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_text_is_refused_by_name(cls: type[Settings], name: str) -> None:
    for text in TEXTS[type(kind_of(cls, name))]:
        if (name, text) not in ALLOWED:
            refuses(name, lambda text=text: build(cls, {**REQUIRED.get(cls, {}), name: text}))


@pytest.mark.parametrize("cls", STRATEGIES.values(), ids=STRATEGIES)
def test_a_wrong_value_in_toml_is_refused_with_name_and_line(cls: type[Strategy[Any]]) -> None:
    good = write_toml(plan_of(cls()))
    assert "settings = {}" in good
    for name in schema(cls):
        wrong = ["[1]", '"x"', "nan", "-1"]
        wrong += ['"no"', "1"] if isinstance(kind_of(cls, name), Flag) else ["true"]
        for value in wrong:
            if (name, value) in ALLOWED:
                continue
            text = good.replace("settings = {}", f"settings = {{ {name} = {value} }}")
            with pytest.raises(SettingError, match=rf"mine\.toml, line 6: settings.*{name}"):
                read_toml(Plan, text, "mine.toml")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_setting_says_what_it_means_and_expects(cls: type[Settings]) -> None:
    for name, declared in schema(cls).items():
        assert declared.field.help, name
        assert declared.field.expected, name


def test_unknown_settings_are_refused() -> None:
    for cls in CLASSES:
        with pytest.raises(SettingError, match="has no setting 'qqqq'"):
            cls(**REQUIRED.get(cls, {}), qqqq=1)


# --- round trips


def values_of(cls: type[Settings], name: str, kind: Field) -> st.SearchStrategy[Any]:
    """Values that a setting accepts, and that fit the other settings often enough."""
    match kind:
        case NoneOr():
            return st.none() | values_of(cls, name, kind.other)
        case FirstOf():
            return st.one_of([values_of(cls, name, each) for each in kind.kinds])
        case Whole():
            low = kind.at_least or 0
            return st.integers(low, low + 8)
        case Number():
            low, high = kind.at_least, kind.at_most
            return st.floats(
                kind.above if low is None else low,
                kind.below if high is None else high,
                exclude_min=low is None and kind.above is not None,
                exclude_max=high is None and kind.below is not None,
                allow_nan=False,
                allow_infinity=kind.infinite,
            )
        case Flag():
            return st.booleans()
        case Choice():
            return st.sampled_from(kind.of)
        case CodecField() if kind.splittable:
            return st.sampled_from([Half(), ErrorFeedback(TopK(0.25)), codec("quantize(4, stochastic=true)")])
        case Instance() if kind.of is Codec:
            return st.sampled_from([codec("powersgd(2)"), codec("bfloat16"), TopK(1e-05, sampled=False)])
        case Instance() if kind.of is GDTopK:
            return objects(GDTopK)
    assert isinstance(kind, Text)
    known = {"groups": ["auto", "0/1", "0-3,6/4,5"], "model": ["", *getattr(cls, "models", ())]}
    return st.sampled_from(known[name])


@st.composite
def objects(draw: st.DrawFn, cls: type[Settings]) -> Settings:
    given = {name: draw(values_of(cls, name, declared.field)) for name, declared in schema(cls).items()}
    optional = draw(st.permutations([own.name for own in fields(cls) if own.default is not MISSING]))
    while True:
        try:
            return cls(**given)
        except SettingError:  # some exclude each other: with fewer of them, most objects are valid
            assume(optional)
            given.pop(optional.pop(), None)


def text_of(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def plan_of(strategy: Strategy[Any]) -> Plan:
    return Plan(
        task="digits",
        model="cnn",
        batch_size=16,
        lr=0.03,
        strategy=strategy.name,
        strategy_settings=non_defaults(type(strategy), strategy.settings()),
        workers=4,
        steps=100,
        target=0.95,
    )


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("cls", BUILT_FROM_TEXTS, ids=lambda cls: cls.__name__)
@given(st.data())
def test_settings_come_back_as_data_and_as_texts(cls: type[Settings], data: st.DataObject) -> None:
    made = data.draw(objects(cls))
    plain = made.settings()
    assert build(cls, plain) == made
    assert build(cls, json.loads(json.dumps(plain))) == made
    assert build(cls, {name: text_of(value) for name, value in plain.items()}) == made
    if isinstance(made, Codec):
        assert codec(str(made)) == made
    if isinstance(made, GDTopK):
        assert GDTopK.from_text(str(made)) == made
    if isinstance(made, Strategy):
        assert read_toml(Plan, write_toml(plan_of(made)), "mine.toml").make_strategy() == made
