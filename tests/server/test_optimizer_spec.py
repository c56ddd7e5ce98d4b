"""OptimizerSpec: the user's optimizer as data, cut to a shard; which optimizers are refused."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim import SGD

import offbeat
from offbeat.core.replica import Replica
from offbeat.server.optimizer_spec import spec_of


class Whole(SGD):
    """Known to nobody."""


def test_an_optimizer_that_cannot_be_cut_is_refused_with_what_to_do() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(offbeat.SettingError, match=r'cannot take over a Whole.*push="update" any'):
        spec_of(Replica(model, optimizer=Whole(model.parameters(), lr=0.1)))
