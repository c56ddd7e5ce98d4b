"""Errors: each one is an OffbeatError, so that one except clause is enough."""

from __future__ import annotations

from offbeat import OffbeatError, SettingError


def test_setting_errors_are_ours_and_value_errors() -> None:
    assert issubclass(SettingError, OffbeatError)
    assert issubclass(SettingError, ValueError)
