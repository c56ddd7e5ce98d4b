"""Messages between workers and a server: frozen data, equal by what they say and not by their memory."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import get_args

import pytest
import torch

from offbeat.server.messages import Answer, Message, Pull, PullReply, Push, Save, Tick

EVERY = [*get_args(Message), *get_args(Answer)]


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_every_message_is_frozen_names_its_parts_and_its_worker(kind: type) -> None:
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(part.kw_only for part in fields(kind))
    assert kind is Tick or fields(kind)[0].name == "worker"
    assert kind.__doc__


def test_a_message_cannot_be_changed() -> None:
    push = Push(worker=0, clock=1, update=[])
    with pytest.raises(FrozenInstanceError):
        push.clock = 2  # type: ignore[misc]


def test_memory_for_a_reply_makes_no_difference() -> None:
    one, other = [torch.zeros(3)], [torch.ones(5)]
    assert Pull(worker=1, clock=2, into=one) == Pull(worker=1, clock=2, into=other)
    assert Pull(worker=1, clock=2) != Pull(worker=1, clock=None)
    assert Save(worker=1, part=1, into=one) == Save(worker=1, part=1)
    assert PullReply(worker=1, staleness=2, weights=one) == PullReply(worker=1, staleness=2, weights=other)
    assert PullReply(worker=1, staleness=2) != PullReply(worker=1, staleness=3)
    assert "tensor" not in repr(Pull(worker=1, clock=2, into=one))
