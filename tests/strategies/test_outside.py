"""A strategy from outside, in no table of ours: the parameter server, another process, finds its class."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat import SSP
from offbeat.errors import SettingError
from offbeat.strategies import STRATEGIES, find_strategy, path_of
from tests.support.launched import run_ranks

MODULE = """
from dataclasses import dataclass
from offbeat import SSP

@dataclass(frozen=True, kw_only=True)
class Patient(SSP):
    name = "patient"
"""

SCRIPT = """
import torch
import offbeat
from patient_strategies import Patient

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.attach(model, optimizer, Patient(staleness=0)) as sync:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert sync.metrics.steps == 3
    print("and a server" if sync.port.client else "alone")
"""


@pytest.mark.processes
def test_server_finds_a_class_that_lies_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "patient_strategies.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(SCRIPT)
    said = run_ranks(str(tmp_path / "train.py"), cwd=Path("/"))
    assert said.count("and a server") == 2


def test_own_strategies_are_found_by_name() -> None:
    for name, cls in STRATEGIES.items():
        assert path_of(cls) == name
        assert find_strategy(name) is cls


class Outsider(SSP):
    name = "outsider"


def test_class_is_found_by_its_path() -> None:
    assert path_of(Outsider) == "tests.strategies.test_outside:Outsider"
    assert find_strategy(path_of(Outsider)) is Outsider


def test_class_that_no_other_process_can_import_is_refused() -> None:
    class Hidden(SSP):
        name = "hidden"

    with pytest.raises(SettingError, match="Move it to the top level of a module"):
        path_of(Hidden)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere.at_all:Mine", "cannot be imported here: No module named 'nowhere'"),
        ("offbeat.strategies:Missing", "cannot be imported here: .*no attribute 'Missing'"),
        ("offbeat.strategies:STRATEGIES", "is no strategy"),
        ("offbeat.errors:SettingError", "is no strategy"),
    ],
)
def test_path_that_leads_nowhere_is_told(path: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        find_strategy(path)
