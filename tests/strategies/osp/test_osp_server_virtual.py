"""OSP through a server that adds up: the same training, its bytes, its budget, and who may be missing."""

from __future__ import annotations

import math

import pytest
import torch

from offbeat import BSP, OSP
from offbeat.errors import OffbeatError
from offbeat.strategies import osp
from offbeat.worlds.virtual.cluster import Absence, ServerMachines
from tests.support.osp_runs import GRADIENT, TOTAL, Many, Steps, Watched, sizes_of
from tests.support.virtual_runs import BYTES_PER_S, Kept, close, cluster_of, play
from tests.support.virtual_servers import ONE_NIC, WIDE

pytestmark = pytest.mark.virtual

places = pytest.mark.parametrize("server", [None, WIDE], ids=["beside", "own"])


@places
@pytest.mark.parametrize("world", [2, 3])
def test_nothing_late_is_bsp(world: int, server: ServerMachines | None) -> None:
    step_s = (0.1, 0.3, 0.2)[:world]
    bsp = play(cluster_of(*step_s), BSP(), 8)
    ours = play(cluster_of(*step_s, server=server), OSP(on="server", budget=0), 8)
    for mine, theirs in zip(ours.weights, bsp.weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        assert world > 2 or torch.equal(mine, theirs)


@places
@pytest.mark.parametrize("correction", ["lgp", "ema-lgp", "none"])
@pytest.mark.parametrize("world", [2, 3])
def test_it_trains_as_on_collectives(world: int, correction: str, server: ServerMachines | None) -> None:
    """With a fixed budget, so that both split alike; looked at in the middle, while gradients travel."""

    def weights(cluster_server: ServerMachines | None, on: str) -> tuple[list[torch.Tensor], list[float]]:
        strategy = OSP(on=on, budget=0.6, growth=0, importance="gradient", correction=correction)
        cluster = cluster_of(*(0.1, 0.3, 0.2)[:world], server=cluster_server)
        run = play(cluster, strategy, 12, task=Steps(), evaluate_every=5)
        return run.weights, [point.value for point in run.history]

    (ours, _), (theirs, _) = weights(server, "server"), weights(None, "collectives")
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
        assert world > 2 or torch.equal(mine, other)


def test_a_world_of_one_is_the_plain_loop_and_sends_nothing() -> None:
    ours = play(cluster_of(0.1, server=WIDE), OSP(on="server", budget=0.5), 6)
    plain = play(cluster_of(0.1), BSP(), 6)
    assert torch.equal(ours.weights[0], plain.weights[0])
    assert ours.each("bytes_left_host") == [0]


def test_bytes_by_hand() -> None:
    """All gradients go to a server of its own once a step; and, in step 2, two numbers and three."""
    steps, world = 7, 2
    run = play(
        cluster_of(*[1.0] * world, server=WIDE), OSP(on="server", budget=0.5, **GRADIENT), steps, task=Steps()
    )
    marked = sum(sizes_of(Steps()))
    assert run.each("bytes_left_host") == [steps * marked + 8 * (2 + 3)] * world


def test_what_hides_costs_nothing_and_a_server_behind_one_nic_carries_all_of_it() -> None:
    """RS goes there and back through one NIC, N times: BSP waits for all blocks, OSP for the important."""
    world, task = 2, Steps(sizes_kib=(16, 16, 64))
    cluster = cluster_of(*[60.0] * world, server=ONE_NIC, forward_share=0.25)

    def a_step(strategy: OSP) -> float:
        seven, six = (
            play(cluster, strategy, n, task=Steps(sizes_kib=task.sizes_kib)).seconds for n in (7, 6)
        )
        return seven - six

    sizes = sizes_of(task)
    there_and_back = 2 * world / BYTES_PER_S
    assert a_step(OSP(on="server", budget=0.7, **GRADIENT)) == close(60.0 + sum(sizes[1:]) * there_and_back)
    assert a_step(OSP(on="server", budget=0)) == close(60.0 + sum(sizes) * there_and_back)


@pytest.mark.parametrize("world", [2, 4])
def test_the_budget_finds_what_a_server_behind_one_nic_hides(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bandwidth · T / N each way, to a block; here both ways are waited for, one after the other.

    What is important travels in one piece: of several, some are on their way back while others go there.
    """
    monkeypatch.setattr(osp, "block_sizes", lambda nbytes: (nbytes, nbytes))
    strategy = Watched(on="server", **GRADIENT)
    step_s = 0.95 * world
    cluster = cluster_of(*[step_s] * world, server=ONE_NIC, forward_share=0.25)
    play(cluster, strategy, 40, task=Many())
    hidden = BYTES_PER_S * step_s / (2 * world)
    assert hidden < 0.8 * TOTAL
    assert strategy.hidden[-1] == pytest.approx(hidden, rel=0.05)
    for state in strategy.states:
        assert state.late == strategy.states[0].late != []


def test_one_who_left_for_good_ends_no_run_and_counts_no_more() -> None:
    away = (Absence(worker=2, from_s=2.5, until_s=math.inf),)
    cluster = cluster_of(1.0, 1.0, 1.0, server=WIDE, away=away)
    run = play(cluster, OSP(on="server", budget=0.5, growth=0), 8, task=Kept())
    assert run.each("steps") == [8, 8, 3]


def test_one_who_comes_back_is_refused_because_nobody_could_tell_it_the_weights() -> None:
    away = (Absence(worker=1, from_s=2.5, until_s=4.2),)
    with pytest.raises(OffbeatError, match="worker 1 came back, but the server has no weights"):
        play(cluster_of(1.0, 1.0, server=WIDE, away=away), OSP(on="server", budget=0.5), 8)
