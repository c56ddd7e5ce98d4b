"""Kinds of settings: which values and texts each one accepts, and the words of its refusals."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from offbeat import Codec, LocalSGD, SettingError, TopK
from offbeat.core.fields import (
    Anything,
    Choice,
    Field,
    FieldError,
    FirstOf,
    Flag,
    Instance,
    ListOf,
    NoneOr,
    Number,
    Text,
    Whole,
    read_inside,
)


def test_an_error_about_a_setting_survives_pickling() -> None:
    with pytest.raises(FieldError) as refusal:
        LocalSGD(period=0)
    copy = pickle.loads(pickle.dumps(refusal.value))
    assert type(copy) is SettingError
    assert str(copy) == str(refusal.value) == "period=0: a whole number of steps, at least 1"


ACCEPTED = [
    (Whole(at_least=1), 3, "3", 3),
    (Number(above=0), 2, "2", 2.0),
    (Number(infinite=True), math.inf, "inf", math.inf),
    (Flag(), True, "TRUE", True),
    (Text(), "a", "a", "a"),
    (Choice(of=("update", "gradient")), "gradient", "gradient", "gradient"),
    (Choice(of=(8, 4, 1)), 4, "4", 4),
    (Instance(of=Codec, noun="a codec"), TopK(0.1), "topk(0.1)", TopK(0.1)),
    (NoneOr(other=Whole()), None, "None", None),
    (NoneOr(other=Whole()), 3, "3", 3),
    (FirstOf(kinds=(Whole(), Text())), "auto", "auto", "auto"),
    (FirstOf(kinds=(Whole(), Text())), 3, "3", 3),
    (Anything(), "x", "x", "x"),
]


@pytest.mark.parametrize(("kind", "value", "text", "read"), ACCEPTED, ids=str)
def test_values_and_texts_are_read_alike(kind: Field, value: Any, text: str, read: Any) -> None:
    assert kind.read(value) == kind.parse(text) == read
    assert type(kind.read(value)) is type(kind.parse(text)) is type(read)
    assert kind.read(kind.read(value)) == read, "what was read once is accepted again"


REFUSED = [
    (Whole(of="steps", at_least=1), [0, -1, 1.0, True, "1", None], "a whole number of steps, at least 1"),
    (Whole(at_least=0), [-1], "a whole number, 0 or more"),
    (Whole(at_least=1, at_most=3), [0, 4], "a whole number from 1 to 3"),
    (Number(above=0, at_most=1), [0, 1.1, math.nan, True, "1"], "a number above 0 and at most 1"),
    (Number(at_least=0, below=1), [-0.1, 1, math.inf], "a number from 0 to below 1"),
    (Number(noun="a ratio"), [math.inf, -math.inf, math.nan], "a ratio"),
    (Flag(), [0, 1, "true", None], "True or False"),
    (Text(noun="a name"), [3, None], "a name"),
    (Choice(of=("update", "gradient")), ["weights", True, 1], "choose one of update, gradient"),
    (Choice(of=(8, 4, 1)), [2, True, "8"], "choose one of 8, 4, 1"),
    (Instance(of=Codec, noun="a codec"), [0.1, TopK, "topk(0.1)"], "a codec"),
    (ListOf(item=Whole(), noun="a list of numbers"), [[], "12", 3], "a list of numbers"),
    (ListOf(item=Whole(), noun="two", names=("up", "down")), [[1], [1, 2, 3]], "two"),
    (FirstOf(kinds=(Whole(), Flag())), ["x", 1.5], "a whole number, or True or False"),
]


@pytest.mark.parametrize(("kind", "values", "expected"), REFUSED, ids=lambda each: str(each)[:40])
def test_other_values_are_refused_with_what_is_expected(
    kind: Field, values: list[Any], expected: str
) -> None:
    assert kind.expected == expected
    for value in values:
        with pytest.raises(FieldError) as refusal:
            read_inside("name", kind, value)
        assert str(refusal.value) == f"name={value!r}: {expected}"
        assert refusal.value.in_file == f"name: expected {expected}, not {value!r}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Whole(), "1.5"),
        (Number(), "much"),
        (Flag(), "yes"),
        (Choice(of=(8, 4)), "2"),
        (Whole(at_least=1), "0"),
    ],
    ids=str,
)
def test_other_texts_are_refused(kind: Field, text: str) -> None:
    with pytest.raises(FieldError, match=kind.expected):
        kind.parse(text)


def test_where_none_is_accepted_a_refusal_says_so() -> None:
    with pytest.raises(FieldError, match=r"^hops='x': a whole number, or None$"):
        read_inside("hops", NoneOr(other=Whole()), "x")


def test_an_error_inside_of_a_list_has_its_path() -> None:
    lists = ListOf(item=ListOf(item=Whole(at_least=0), noun="a pair", names=("up", "down")), noun="pairs")
    with pytest.raises(FieldError) as refusal:
        read_inside("links", lists, [[1, 2], [3, -4]])
    assert refusal.value.path == ("links", 1, "down")
    assert str(refusal.value) == "links[1].down=-4: a whole number, 0 or more"
    assert lists.read([[1, 2]]) == ((1, 2),)


def test_long_values_are_cut_short_in_errors() -> None:
    with pytest.raises(FieldError) as refusal:
        Whole().read("x" * 1000)
    assert len(str(refusal.value)) < 150
    with pytest.raises(FieldError, match="a number that long"):
        Number().read(10**400)


def test_codecs_are_kept_as_texts_where_only_data_can_be() -> None:
    kind = NoneOr(other=Instance(of=Codec, noun="a codec"))
    assert kind.plain(TopK(0.1)) == "topk(0.1)"
    assert kind.plain(None) is None
    assert ListOf(item=kind, noun="codecs").plain((None, TopK(0.1))) == (None, "topk(0.1)")
