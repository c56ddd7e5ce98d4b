"""Errors: each one is an OffbeatError, so that one except clause is enough."""

from __future__ import annotations

import offbeat
from offbeat import OffbeatError, SettingError, errors


def test_setting_errors_are_ours_and_value_errors() -> None:
    assert issubclass(SettingError, OffbeatError)
    assert issubclass(SettingError, ValueError)


def test_every_error_is_ours() -> None:
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(found) == 7
    for error in found:
        assert issubclass(error, OffbeatError) and issubclass(error, RuntimeError), error
        assert error.__doc__, error
        assert str(error("rank 3 died")) == "rank 3 died"


def test_errors_that_users_catch_are_exported() -> None:
    names = (
        "OffbeatError",
        "SettingError",
        "LaunchError",
        "MismatchError",
        "RankLost",
        "RankDropped",
        "DataError",
    )
    for name in names:
        assert getattr(offbeat, name) is getattr(errors, name)
