"""Kinds of settings: which values and texts each one accepts, and the words of its refusals."""

from __future__ import annotations

import pickle

import pytest

from offbeat import LocalSGD, SettingError
from offbeat.core.fields import FieldError


def test_an_error_about_a_setting_survives_pickling() -> None:
    with pytest.raises(FieldError) as refusal:
        LocalSGD(period=0)
    copy = pickle.loads(pickle.dumps(refusal.value))
    assert type(copy) is SettingError
    assert str(copy) == str(refusal.value) == "period=0: a whole number of steps, at least 1"
