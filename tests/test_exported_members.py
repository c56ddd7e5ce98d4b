"""The public names: exactly these, sorted, each imported when it is first used."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat
from tests.support.limits import HANG_S


def test_exported_members() -> None:
    assert offbeat.__all__ == [
        "ASP",
        "BSP",
        "DSSP",
        "GSSP",
        "OSP",
        "SSDSGD",
        "SSP",
        "Arrived",
        "Auto",
        "BFloat16",
        "Block",
        "Codec",
        "DataError",
        "DataInjection",
        "DefDP",
        "DiLoCo",
        "ErrorFeedback",
        "GDTopK",
        "Half",
        "Lane",
        "LaunchError",
        "LocalSGD",
        "MismatchError",
        "OffbeatError",
        "Op",
        "Oscars",
        "Pending",
        "Port",
        "PowerSGD",
        "Quantize",
        "RandomK",
        "RankDropped",
        "RankLost",
        "Replica",
        "SelDP",
        "SelSync",
        "SettingError",
        "SharedSampler",
        "SimulationResult",
        "SparseLoCo",
        "Strategy",
        "Sync",
        "TopK",
        "attach",
        "label_skew",
        "simulate",
    ]
    assert all(hasattr(offbeat, name) for name in offbeat.__all__)
    assert set(offbeat.__all__) <= set(dir(offbeat))


def test_type_checkers_and_python_find_the_names_in_the_same_modules() -> None:
    tree = ast.parse(Path(offbeat.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {a.name: f.module for f in block.body if isinstance(f, ast.ImportFrom) for a in f.names}
    assert typed == offbeat._MODULE_OF
    assert sorted(typed) == sorted(offbeat.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'offbeat' has no attribute 'LocalSDG'"):
        offbeat.LocalSDG  # noqa: B018


LAZY = """
import sys, offbeat
assert "torch" not in sys.modules
assert offbeat.__version__
import offbeat.attach, offbeat.experiments.process_run
assert callable(offbeat.attach), "the module of the same name has taken its place"
from offbeat import *
assert attach is offbeat.attach is sys.modules["offbeat.attach"].attach
"""


@pytest.mark.processes
def test_torch_is_imported_late_and_attach_stays_the_function() -> None:
    subprocess.run([sys.executable, "-c", LAZY], check=True, timeout=HANG_S)


def test_the_package_can_be_pickled_by_its_name() -> None:
    """Ray sends functions to other processes with the modules that they use."""
    assert pickle.loads(pickle.dumps(offbeat)) is offbeat
