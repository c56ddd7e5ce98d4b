"""The tasks by name."""

from __future__ import annotations

import pytest

from offbeat.errors import SettingError
from offbeat.experiments.tasks import TASKS, task


def test_each_task_is_listed_under_its_name_with_a_line_about_it() -> None:
    assert {"digits", "mnist", "fashion-mnist"} <= set(TASKS)
    for name, kind in TASKS.items():
        assert kind.name == name
        assert kind.summary and "\n" not in kind.summary


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_built_by_its_name(name: str) -> None:
    built = task(name, lr=0.125)
    assert type(built) is TASKS[name] and built.lr == 0.125
    with pytest.raises(SettingError, match=f"unknown task '{name}x'"):
        task(name + "x")
