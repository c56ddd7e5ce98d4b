"""The tasks: the models and data that Offbeat's own commands train."""

from typing import Any

from offbeat.settings import build, pick
from offbeat.tasks.digits import Digits
from offbeat.tasks.mnist import FashionMnist, Mnist
from offbeat.tasks.quadratic import Quadratic
from offbeat.tasks.task import Batch, Data, Task

__all__ = ["TASKS", "Batch", "Data", "Task", "task"]

TASKS: dict[str, type[Task]] = {kind.name: kind for kind in (Digits, Mnist, FashionMnist, Quadratic)}


def task(name: str, **settings: Any) -> Task:
    """The task of this name, with these settings instead of its defaults."""
    return build(pick("task", name, TASKS), settings)
