"""Codecs on pushes to a server: what is folded in, what is kept, what it costs on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat import ASP, DSSP, SSP, ErrorFeedback, Half, Quantize, RandomK, TopK
from offbeat.core.pending import Arrived
from offbeat.core.port import PullResult
from offbeat.core.replica import Replica
from offbeat.server.packets import allocate, encode
from offbeat.worlds.virtual.cluster import Cluster, Workers
from tests.conformance.table import AnyStrategy
from tests.support.both_worlds import KeptDigits, cluster_of, job_of, really, virtually
from tests.support.crew import Crew
from tests.support.loops import flat
from tests.support.virtual_runs import Kept, play

STEPS = 8
pytestmark = pytest.mark.virtual


def final(strategy: AnyStrategy, task: Any = None) -> list[torch.Tensor]:
    """Three workers, none as fast as another, on links so fast that sizes change no order."""
    nic = {"up_bits_per_s": 1e15, "down_bits_per_s": 1e15}
    groups = tuple(Workers(step_s=seconds, **nic) for seconds in (0.1, 0.137, 0.171))
    return play(Cluster(workers=groups), strategy, STEPS, task=task or Kept(dimension=1024)).weights


@pytest.mark.parametrize("codec", [TopK(1.0), ErrorFeedback(TopK(1.0)), RandomK(1.0)], ids=str)
def test_a_codec_that_loses_nothing_changes_nothing(codec: Any) -> None:
    """To the bit: every packet is folded in where the update would have been."""
    for make in (SSP, DSSP, ASP):
        assert all(map(torch.equal, final(make()), final(make(codec=codec))))


def test_gradients_for_a_server_that_steps_travel_so_too() -> None:
    plain = final(SSP(push="gradient"), KeptDigits())
    coded = final(SSP(push="gradient", codec=ErrorFeedback(TopK(1.0))), KeptDigits())
    assert all(map(torch.equal, plain, coded))


@pytest.mark.parametrize(
    ("codec", "packet"),
    [  # a share of 256 of the 1024 weights
        (TopK(0.1), 26 * 6),
        (ErrorFeedback(TopK(0.02)), 5 * 6),
        (RandomK(0.1), 8 + 26 * 4),
        (Quantize(8), 256 + 4),
        (ErrorFeedback(Quantize(4)), 128 + 2 * 4),
        (Half(), 512),
    ],
    ids=str,
)
def test_bytes_of_pushes_are_those_of_packets(codec: Any, packet: int) -> None:
    """Beside each of 4 workers a shard; three of four pushes and answers leave a worker's NIC."""
    run = play(cluster_of(4), SSP(staleness=0, codec=codec), STEPS, task=Kept(dimension=1024))
    dense = play(cluster_of(4), SSP(staleness=0), STEPS, task=Kept(dimension=1024))
    for ours, theirs in zip(run.ledgers, dense.ledgers, strict=True):
        assert theirs.bytes_left_host - ours.bytes_left_host == STEPS * 3 * (256 * 4 - packet)


def test_what_is_kept_comes_later() -> None:
    """Weights stand still where nothing is kept; with feedback all of them are trained."""
    start = flat(Kept(dimension=1024).build())
    codecs = (TopK(0.01), ErrorFeedback(TopK(0.01)))
    moved = [final(SSP(staleness=0, codec=codec))[0] != start for codec in codecs]
    assert moved[0].any()
    assert not moved[0].all()
    assert moved[1].sum() > moved[0].sum()


@pytest.mark.parametrize("codec", [ErrorFeedback(TopK(0.1)), ErrorFeedback(Quantize(8))], ids=str)
def test_a_virtual_run_trains_as_a_real_one(crew: Any, codec: Any) -> None:
    """To rounding, which a codec may turn into another choice: so the loss is compared, and the bytes."""
    job = job_of(SSP(staleness=0, codec=codec), 2)
    real_crew: Crew = crew(2)
    virtual, real = virtually(job), really(real_crew, job)
    for ours, theirs in zip(virtual.history, real.history, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)
    for ours, theirs in zip(virtual.weights, real.weights, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()


STRATEGY = SSP(staleness=0, codec=ErrorFeedback(TopK(0.25)))


class Refusing:
    """A port to a server with two shards, which takes what is finite."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.pushed: list[torch.Tensor] = []

    @property
    def server(self) -> Refusing:
        return self

    def push(self, update: list[torch.Tensor], clock: int, *, report: Any, codec: int) -> Arrived[bool]:
        self.pushed.append(update[0].clone())
        chosen = STRATEGY.server_half().push_codecs[codec - 1]
        packets = allocate(chosen, update)
        encode(chosen, update, packets, clock)
        return Arrived(bool(self.pushed[-1].isfinite().all()))

    def pull(self, into: list[torch.Tensor], clock: int) -> Arrived[PullResult]:
        return Arrived(PullResult(0))


def test_what_is_kept_outlives_a_push_that_is_refused() -> None:
    """And no shard takes a part of such a push: what it took would be sent a second time."""
    strategy = STRATEGY
    model = torch.nn.Linear(4, 4, bias=False)
    replica = Replica(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    port, kept = Refusing(), []
    with torch.no_grad():
        state = strategy.init(replica)
        for change in (1.0, torch.nan, 1.0):
            step = strategy.step(state, replica, port)  # type: ignore[arg-type]
            moment: Any = step.send(None)  # the optimizer steps
            replica.weights[0][3] += change
            replica.weights[0][4:12] += 0.1
            moment.fire(True)
            with pytest.raises(StopIteration):
                step.send(None)
            kept.append(state.error[0].clone())
    assert torch.equal(kept[0], kept[1])
    assert port.pushed[1].isnan().all()
    assert kept[0].any()
    assert port.pushed[2].isfinite().all()
