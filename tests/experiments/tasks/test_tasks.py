"""The tasks by name."""

from __future__ import annotations

from offbeat.experiments.tasks import TASKS


def test_each_task_is_listed_under_its_name_with_a_line_about_it() -> None:
    assert {"digits", "mnist", "fashion-mnist"} <= set(TASKS)
    for name, kind in TASKS.items():
        assert kind.name == name
        assert kind.summary and "\n" not in kind.summary
