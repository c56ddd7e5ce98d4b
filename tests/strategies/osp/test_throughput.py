"""Meter: all workers ask at the same steps, and count from the last answer, or from a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.core.members import Members
from offbeat.core.pending import Arrived, Pending, block_on
from offbeat.core.port import Lane, Op, Usage
from offbeat.strategies.osp.throughput import EVERY, ThroughputMeter
from tests.support.lone_port import OtherMember


@dataclass
class Alone:
    """A port whose clock the test sets; of all workers it is the only one."""

    now: Usage = field(default_factory=lambda: Usage(0.0, 0.0, 0))
    asked: list[tuple[Op, Lane]] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        self.asked.append((op, lane))
        return Arrived(tensor)


def _read(
    meter: ThroughputMeter, port: Any, steps: int, opinion: list[float], each: Usage
) -> list[list[float] | None]:
    answers = []
    for _ in range(steps):
        answers.append(block_on(meter.read(port, port.now, torch.tensor(opinion, dtype=torch.float64))))
        port.now = Usage(*(now + more for now, more in zip(port.now, each, strict=True)))
    return answers


def test_it_asks_every_few_steps_and_answers_a_step_later() -> None:
    meter, port = ThroughputMeter(), Alone()
    answers = _read(meter, port, 2 * EVERY + 3, [7.0, 9.0], Usage(0.5, 0.25, 1000))
    asked = [step for step, answer in enumerate(answers) if answer is not None]
    assert asked == [2, EVERY + 2, 2 * EVERY + 2]
    assert answers[2] == [7.0, 9.0]
    assert port.asked == [(Op.MAX, Lane.BACK)] * 3
    assert (meter.compute_s, meter.bytes_per_s) == (0.5, 4000.0)


def test_a_new_pace_is_believed_by_half() -> None:
    meter, port = ThroughputMeter(), Alone()
    _read(meter, port, EVERY + 2, [0.0], Usage(0.5, 0.25, 1000))
    _read(meter, port, EVERY, [0.0], Usage(1.5, 0.25, 3000))
    assert _read(meter, port, 1, [0.0], Usage(1.5, 0.25, 3000)) == [[0.0]]
    assert meter.compute_s == 1.0, "the median: all but one of its last steps took 1.5"
    assert 6000 < meter.bytes_per_s < 8000


def test_after_a_restart_it_counts_anew() -> None:
    meter, port = ThroughputMeter(), Alone()
    _read(meter, port, 5 * EVERY + 3, [0.0], Usage(0.5, 0.25, 1000))
    again = Alone()
    _read(meter, again, 3 * EVERY, [0.0], Usage(0.5, 0.25, 1000))
    assert (meter.compute_s, meter.bytes_per_s) == (0.5, 4000.0)


def test_a_loop_that_pauses_is_not_a_slow_worker() -> None:
    meter, port = ThroughputMeter(), Alone()
    for _ in range(3 * EVERY):
        _read(meter, port, 4, [0.0], Usage(0.5, 0.25, 1000))
        port.now = port.now._replace(compute_s=port.now.compute_s + 1000.0)
    assert (meter.compute_s, meter.bytes_per_s) == (0.5, 4000.0)


def test_members_of_a_sharded_replica_add_up_their_summands_of_importance() -> None:
    meter, port = ThroughputMeter(), Alone()
    members = Members(OtherMember(10.0, 20.0), sharded=True)  # type: ignore[arg-type]
    own = torch.tensor([1.0, 2.0], dtype=torch.float64)
    answers = [block_on(meter.read(port, port.now, own, members)) for _ in range(3)]  # type: ignore[arg-type]
    assert answers[2] == [11.0, 22.0]
    assert own.tolist() == [1.0, 2.0], "what this rank measured stays its own"
