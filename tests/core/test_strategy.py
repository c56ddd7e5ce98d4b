"""Strategy: what a new strategy gets without saying anything, and what it must say itself."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import Annotated

import pytest
import torch
from torch import nn

from offbeat import SettingError, Strategy
from offbeat.core.blocks import Layout
from offbeat.core.fields import Whole
from offbeat.core.pending import block_on
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from tests.support.lone_port import NotingPort


@dataclass(frozen=True, kw_only=True)
class Least(Strategy[None]):
    name = "least"
    summary = "steps alone"

    every: Annotated[int, Whole("steps", of="steps", at_least=1)] = 4

    def init(self, replica: Replica) -> None:
        return None

    async def step(self, state: None, replica: Replica, port: Port) -> None:
        await replica.update()


class Identical(Least):
    identical_replicas = True


def test_without_its_two_methods_it_is_no_strategy() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Nothing(Strategy[None]):
        name = "nothing"
        summary = "does nothing"

    with pytest.raises(TypeError, match=r"init.*step"):
        Nothing()  # type: ignore[abstract]


def test_defaults() -> None:
    model = nn.Linear(3, 2)
    assert Least().layout(model) == Layout.default(model)
    assert not Least().layout(model).gradients, "gradients are gathered for those only who ask"
    assert Least().server_half() is None
    assert not Least.identical_replicas


@pytest.mark.parametrize(("strategy", "operations"), [(Least(), ["all_reduce"]), (Identical(), [])], ids=str)
def test_weights_are_averaged_to_publish_unless_they_are_the_same(
    strategy: Least, operations: list[str]
) -> None:
    replica, port = Replica(nn.Linear(3, 2)), NotingPort(world=2)
    with torch.no_grad():
        block_on(strategy.publish(None, replica, port))
        block_on(strategy.drain(None, replica, port))
    assert [signature.operation for signature, _ in port.started] == operations


def test_settings_are_frozen_checked_and_part_of_the_text() -> None:
    strategy = Least(every=2)
    assert strategy.settings() == {"every": 2}
    assert strategy == Least(every=2) != Least()
    with pytest.raises(FrozenInstanceError):
        strategy.every = 3  # type: ignore[misc]
    with pytest.raises(SettingError, match="every=0: a whole number of steps, at least 1"):
        Least(every=0)
