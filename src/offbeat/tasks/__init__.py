"""The tasks: the models and data that Offbeat's own commands train."""

from dataclasses import fields
from typing import Any

from offbeat.tasks.digits import Digits
from offbeat.tasks.mnist import FashionMnist, Mnist
from offbeat.tasks.quadratic import Quadratic
from offbeat.tasks.task import Batch, Data, Task, unknown

__all__ = ["TASKS", "Batch", "Data", "Task", "task"]

TASKS: dict[str, type[Task]] = {kind.name: kind for kind in (Digits, Mnist, FashionMnist, Quadratic)}


def task(name: str, **settings: Any) -> Task:
    """The task of this name, with these settings instead of its defaults."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    kind = TASKS[name]
    known = [field.name for field in fields(kind)]
    for setting in settings:
        if setting not in known:
            raise unknown(f"setting of task {name}", setting, known)
    return kind(**settings)
