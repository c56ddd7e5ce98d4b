"""Real processes that are killed and stopped under collective strategies: the others go on, and are right."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat import BSP, OSP, SSDSGD, DiLoCo, ErrorFeedback, LocalSGD, SelSync, TopK
from offbeat.worlds.virtual.cluster import Absence
from tests.support.elastic import LR, After, AfterReturn, Deed, ElasticCrew, target_of, train_bowl
from tests.support.elastic_forms import bsp, number_of, periodic
from tests.support.elastic_virtual import play_elastic
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.processes

STEPS, AT = 12, 5  # the worker dies in the step after AT, which is then the first without it


@pytest.fixture
def elastic_crew() -> Iterator[Any]:
    crews: list[ElasticCrew] = []

    def hire(founders: int) -> ElasticCrew:
        crews.append(ElasticCrew(founders))
        return crews[-1]

    yield hire
    for crew in crews:
        crew.dismiss()


def run_and_lose(crew: ElasticCrew, strategy: Any, deeds: list[Deed], **options: Any) -> list[Any]:
    """Train; the results of those who are left."""
    for _ in range(crew.founders):
        crew.start(train_bowl, strategy, After(STEPS), deeds, *options.values())
    lost = [deed.number for deed in deeds]
    return [crew.result(number) for number in range(crew.founders) if number not in lost]


# --- closed forms: who takes part in a round decides what comes out


EVERYONE, LEFT = [f"rank{n}" for n in range(4)], ["rank0", "rank1", "rank3"]
ROSTERS = [EVERYONE] * AT + [LEFT] * (STEPS - AT)


def carried(warmup: int, delay: int, momentum: float) -> list[Tensor]:
    """SSD-SGD: w_glob of all, then the local weights of those who are left, in the order of workers.

    In step AT the dead worker has waited for its last push, which so counts on all, and launches the next,
    which counts on nobody.
    """
    zeros = torch.zeros(32, dtype=torch.float64)
    w_glob, m_glob = zeros, zeros
    local = dict.fromkeys(EVERYONE, (zeros, zeros))
    pushed: dict[str, Tensor] = {}
    element = torch.cat([torch.arange(20) // 8 + 2, torch.arange(12) // 8])  # lines: the last lies first
    phase = torch.stack([element >= 5 * (part + 1) // delay for part in range(delay)]).sum(0)
    for step in range(STEPS):
        there = ROSTERS[step]
        grads = {w: local[w][0] - target_of(number_of(w)) for w in there}
        t = step - warmup
        if t < 0:
            m_glob = momentum * m_glob + torch.stack(list(grads.values())).mean(0)
            w_glob = w_glob - LR * m_glob
            local = dict.fromkeys(there, (w_glob, m_glob))
            continue
        if pushed:
            m_glob = momentum * m_glob + torch.stack(list(pushed.values())).mean(0)
            w_glob = w_glob - LR * m_glob
        for w in there:
            weights, velocity = local[w]
            if t > 1:  # every worker owns everything: what it would pull is here, with the latest push
                came = phase == (t - 1) % delay
                weights, velocity = torch.where(came, w_glob, weights), torch.where(came, m_glob, velocity)
            velocity = momentum * velocity + grads[w]
            local[w] = weights - LR * velocity, velocity
        pushed = grads
    m_glob = momentum * m_glob + torch.stack(list(pushed.values())).mean(0)
    return [w_glob - LR * m_glob, *(local[w][0] for w in LEFT)]


CLOSED_FORMS = [
    (BSP(), bsp(ROSTERS)),
    (LocalSGD(period=3), periodic(LocalSGD(period=3), ROSTERS)),
    (DiLoCo(period=3), periodic(DiLoCo(period=3), ROSTERS)),
    (SelSync(delta=0.0), bsp(ROSTERS)),  # under plain SGD, averaging weights is averaging gradients
    (OSP(budget=0), bsp(ROSTERS)),
]


@pytest.mark.parametrize(("strategy", "expected"), CLOSED_FORMS, ids=lambda each: getattr(each, "name", ""))
def test_survivors_go_on_with_the_mean_of_those_who_are_left(elastic_crew, strategy, expected) -> None:
    left = run_and_lose(elastic_crew(4), strategy, [Deed(2, "launched", AT)])
    check_alike(left)
    for result in left:
        assert result["worlds"] == [4] * AT + [3] * (STEPS - AT)
        torch.testing.assert_close(torch.tensor(result["weights"], dtype=torch.float64), expected)
    assert sorted(result["rank"] for result in left) == [0, 1, 2]
    death = Absence(worker=2, from_s=AT + 0.5)  # in virtual time, in the same step
    virtual = play_elastic(cluster_of(1.0, 1.0, 1.0, 1.0, away=(death,)), strategy, STEPS)
    assert left[0]["weights"] == virtual.ends[0].weights.tolist(), "not the bits of virtual time"


def check_alike(results: list[Any]) -> None:
    """All workers have the same weights, bit for bit, the same buffers, and made all steps."""
    for result in results:
        for key in ("weights", "published", "seen", "momentum"):
            assert result[key] == results[0][key], key
        assert result["joined_at"] + result["steps"] == results[0]["joined_at"] + results[0]["steps"]


@pytest.mark.parametrize("warmup", [0, 3])
def test_nothing_of_the_global_weights_is_lost_with_an_owner(elastic_crew, warmup: int) -> None:
    """Under SSD-SGD. The dead worker has launched its push of step AT, which nobody gets."""
    strategy = SSDSGD(warmup=warmup, delay=3)
    left = run_and_lose(elastic_crew(4), strategy, [Deed(2, "launched", AT)], minimum=2, momentum=0.5)
    w_glob, *expected = carried(warmup, 3, 0.5)
    for result, weights in zip(left, expected, strict=True):
        assert result["published"] == left[0]["published"]
        assert result["worlds"][-1] == 3
        torch.testing.assert_close(torch.tensor(result["published"], dtype=torch.float64), w_glob)
        torch.testing.assert_close(torch.tensor(result["weights"], dtype=torch.float64), weights)
    death = Absence(worker=2, from_s=AT + 1.5)  # in virtual time, while its push of step AT is not awaited
    cluster = cluster_of(1.0, 1.0, 1.0, 1.0, away=(death,))
    virtual = play_elastic(cluster, strategy, STEPS, minimum=2, momentum=0.5)
    for result, number in zip(left, (0, 1, 3), strict=True):
        assert result["weights"] == virtual.ends[number].weights.tolist(), "not the bits of virtual time"


COMPRESSED = ErrorFeedback(TopK(0.5))
HIDDEN = [
    # An exchange behind two steps of computation, with packets, which is in flight when the worker dies.
    DiLoCo(period=4, fragments=1, delay=2, codec=COMPRESSED, mix=0.0),
    OSP(budget=0.5, growth=0, codec=COMPRESSED),
    BSP(codec=COMPRESSED),
]


@pytest.mark.parametrize("strategy", HIDDEN, ids=lambda strategy: strategy.name)
def test_exchanges_in_flight_and_packets_are_redone(elastic_crew, strategy) -> None:
    crew = elastic_crew(4)
    for _ in range(4):
        crew.start(train_bowl, strategy, After(STEPS), [Deed(1, "launched", AT)], 2)
    left = [crew.result(number) for number in (0, 2, 3)]
    for result in left:
        assert result["published"] == left[0]["published"]
        assert result["steps"] == STEPS
        assert result["worlds"][-1] == 3
        assert all(abs(value) < 100 for value in result["published"])  # the targets' means are within


def test_one_that_dies_right_after_counting_does_not_split_the_others(elastic_crew) -> None:
    """Its last step counts on all, or on none of them."""
    left = run_and_lose(elastic_crew(4), BSP(), [Deed(2, "voted", AT)])
    check_alike(left)
    with_it = left[0]["worlds"].index(3)
    assert with_it in (AT, AT + 1)
    expected = bsp([EVERYONE] * with_it + [LEFT] * (STEPS - with_it))
    torch.testing.assert_close(torch.tensor(left[0]["weights"], dtype=torch.float64), expected)


def test_two_die_at_once(elastic_crew) -> None:
    left = run_and_lose(elastic_crew(4), BSP(), [Deed(0, "launched", AT), Deed(3, "launched", AT)])
    check_alike(left)
    expected = bsp([EVERYONE] * AT + [["rank1", "rank2"]] * (STEPS - AT))
    torch.testing.assert_close(torch.tensor(left[0]["weights"], dtype=torch.float64), expected)


def test_too_few_are_left(elastic_crew) -> None:
    crew = elastic_crew(3)
    for _ in range(3):
        crew.start(train_bowl, BSP(), After(STEPS), [Deed(1, "launched", AT)], 3)
    for number in (0, 2):
        said = [crew.hear(number) for _ in range(AT + 2)]
        kind, message = said[-1]
        assert kind == "RankLost"
        assert "2 of 3 workers are left (worker0.1, worker2.1), but at least 3 must be" in message
        assert "lost are worker1.1" in message


def test_stopped_worker_is_dropped_refused_and_comes_back_as_a_newcomer(elastic_crew) -> None:
    crew = elastic_crew(3)
    stop = Deed(1, "launched", AT, signal.SIGSTOP)
    for _ in range(3):
        crew.start(train_bowl, BSP(), AfterReturn(3, 4), [stop], 1, 0.5)
    while crew.hear(0)[1][2] != 2:  # steps of three workers, then the first of two
        pass
    crew.signal(1, signal.SIGCONT)
    results = [crew.result(number) for number in range(3)]
    check_alike(results)
    assert results[1]["joined_at"] > AT
    assert [result["rank"] for result in results] == [0, 2, 1]
    assert results[0]["worlds"][:AT] == [3] * AT
    assert results[0]["worlds"][-4:] == [3] * 4


JOINED = [
    BSP(codec=COMPRESSED),
    DiLoCo(period=3),
    SSDSGD(warmup=2, delay=3),
    SSDSGD(rule="authors", warmup=0),
]


@pytest.mark.parametrize("strategy", JOINED, ids=lambda each: f"{each.name} {getattr(each, 'rule', '')}")
def test_newcomer_has_the_state_of_the_others_and_takes_its_part(elastic_crew, strategy) -> None:
    crew = elastic_crew(2)
    options = ([], 2, 0.5)
    for _ in range(2):
        crew.start(train_bowl, strategy, AfterReturn(3, 6), *options)
    for number in range(2):
        assert crew.hear(number)[1] == ("attached", 2, 0)
    crew.start(train_bowl, strategy, AfterReturn(3, 6), *options)
    results = [crew.result(number) for number in range(3)]
    for result in results:
        assert result["published"] == results[0]["published"]
        if not isinstance(strategy, SSDSGD):  # which averages statistics every few steps
            assert result["seen"] == results[0]["seen"]
    assert results[2]["joined_at"] > 0
    assert results[2]["worlds"] == [3] * 6
    assert results[0]["worlds"] == [2] * results[2]["joined_at"] + [3] * 6
