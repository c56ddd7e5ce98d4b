"""Names that a shell completes: strategies, tasks and clusters, known without importing torch.

An import of torch takes seconds, too long for a press of a key. So the names of Offbeat's own strategies and
tasks stand here once more; tests/cli/test_completion.py compares them with the classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

OWN = {
    "strategies": (
        *("bsp", "local_sgd", "diloco", "sparse_loco", "selsync", "osp", "ssd_sgd"),
        *("asp", "ssp", "dssp", "gssp", "oscars", "auto"),
    ),
    "tasks": (
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "multi30k",
        "wikitext2",
        "shakespeare",
        "quadratic",
    ),
}
PRESETS = Path(__file__).parents[1] / "worlds" / "virtual" / "presets"


def strategy_names(incomplete: str) -> list[str]:
    """Return the strategies whose names begin so; plugins follow our own."""
    return _beginning(incomplete, _names("strategies"))


def strategy_lists(incomplete: str) -> list[str]:
    """Return lists of strategies that begin so: a name is completed after each comma."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _beginning(last, _names("strategies"))]


def task_names(incomplete: str) -> list[str]:
    """Return the tasks whose names begin so; plugins follow our own."""
    return _beginning(incomplete, _names("tasks"))


def cluster_names(incomplete: str) -> list[str]:
    """Return the preset clusters whose names begin so."""
    return _beginning(incomplete, sorted(file.stem for file in PRESETS.glob("*.toml")))


def _names(kind: str) -> list[str]:
    return [*OWN[kind], *sorted(entry.name for entry in entry_points(group=f"offbeat.{kind}"))]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
