"""The tasks: the models and data that Offbeat's own commands train; plugins follow (`core/plugins.py`)."""

from typing import Any

from offbeat.core.plugins import Catalog
from offbeat.core.settings import build, lookup
from offbeat.experiments.tasks.base import Batch, Data, Task
from offbeat.experiments.tasks.cifar import Cifar10
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.tasks.mnist import FashionMnist, Mnist
from offbeat.experiments.tasks.multi30k import Multi30k
from offbeat.experiments.tasks.own import import_task
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.tasks.shakespeare import Shakespeare
from offbeat.experiments.tasks.wikitext import WikiText2

__all__ = ["TASKS", "Batch", "Data", "Task", "task"]

_OWN = (Digits, Mnist, FashionMnist, Cifar10, Multi30k, WikiText2, Shakespeare, Quadratic)
TASKS: Catalog[Task] = Catalog("task", "offbeat.tasks", Task, {cls.name: cls for cls in _OWN})


def task(name: str, **settings: Any) -> Task:
    """Build the task of this name, or of the function `package.module:build`, with these settings."""
    if ":" in name:
        return import_task(name, settings)
    return build(lookup("task", name, TASKS), settings)
