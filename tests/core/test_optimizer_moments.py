"""Averages of an optimizer's moments, each on its own period, against copies that are averaged by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import LocalSGD, SettingError
from offbeat.core.conductor import Conductor
from offbeat.core.ledger import Ledger
from offbeat.core.optimizer_moments import is_shareable, limit_first_moments, share_state
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from tests.support.exchanges import equal_workers, virtually

pytestmark = pytest.mark.virtual

STEPS, WORLD = 8, 3
KAPPA = 0.1 / (0.001 * (1 - 0.81 / 0.999)) ** 0.5  # the largest |m|/√v with Adam's own β, by Cauchy-Schwarz


def built() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.ones(7, 5)), nn.Parameter(torch.ones(9))])


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    adaptive: dict[str, Any] = {"adam": torch.optim.Adam, "adamax": torch.optim.Adamax}
    if kind in adaptive:
        return adaptive[kind](model.parameters(), lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def set_gradients(model: nn.ParameterList, rank: int, step: int) -> None:
    """Give no gradient to parameter 1 on worker 2: it never has moments there."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    for number, param in enumerate(model):
        param.grad = torch.randn(param.shape, generator=generator) if number + rank < 3 else None


async def trained(port: Port, strategy: LocalSGD, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights and the moments in the end."""
    model = built()
    optimizer = optimizer_of(kind, model)
    replica = Replica(model, optimizer=optimizer)
    conductor: Conductor[Any] = Conductor(strategy, replica, port, Ledger(port.rank, lambda: 0.0))
    for step in range(STEPS):
        set_gradients(model, port.rank, step)
        await conductor.begin()
        optimizer.step()
        await conductor.update()
    return [p.detach().clone() for p in model], moments_of(optimizer, model)


def moments_of(optimizer: torch.optim.Optimizer, model: nn.ParameterList) -> list[Tensor]:
    names = ("momentum_buffer", "exp_avg", "exp_avg_sq", "exp_inf")
    states = [optimizer.state.get(param, {}) for param in model]
    return [state[name].clone() for state in states for name in names if name in state]


def by_hand(strategy: LocalSGD, kind: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    models = [built() for _ in range(WORLD)]
    optimizers = [optimizer_of(kind, model) for model in models]
    first, second = strategy.first_moments or 1000, strategy.second_moments or 1000
    periods = {"momentum_buffer": first, "exp_avg": first, "exp_avg_sq": second, "exp_inf": second}.items()
    for step in range(STEPS):
        for rank in range(WORLD):
            set_gradients(models[rank], rank, step)
            optimizers[rank].step()
        for number in range(2):
            if (step + 1) % strategy.period == 0:
                mean = torch.stack([model[number].data for model in models]).mean(0)
                for model in models:
                    model[number].data = mean.clone()
            for name, period in periods:
                states = [o.state.get(m[number], {}) for o, m in zip(optimizers, models, strict=True)]
                having = [state for state in states if name in state]
                if (step + 1) % period == 0 and having:
                    mean = torch.stack([state[name] for state in having]).mean(0)
                    for state in having:
                        state[name] = mean.clone()
            for state in states if kind != "momentum" and (step + 1) % first == 0 else ():
                if state:
                    root = state["exp_avg_sq"].sqrt() if kind == "adam" else state["exp_inf"]
                    limit = (KAPPA if kind == "adam" else 0.1 / (1 - 0.9 / 0.999)) * root
                    state["exp_avg"] = state["exp_avg"].minimum(limit).maximum(-limit)
    pairs = zip(models, optimizers, strict=True)
    return [([p.detach() for p in m], moments_of(o, m)) for m, o in pairs]


@pytest.mark.parametrize("kind", ["momentum", "adam", "adamax"])
@pytest.mark.parametrize(("first", "second"), [(None, None), (3, 6), (2, 5), (1, 1), (3, None), (None, 2)])
def test_each_moment_is_averaged_on_its_own_period(kind: str, first: int | None, second: int | None) -> None:
    strategy = LocalSGD(period=2, first_moments=first, second_moments=second)
    ours = [made for made, _ in virtually(trained, equal_workers(WORLD), strategy, kind)]
    for one, other in zip(ours, by_hand(strategy, kind), strict=True):
        for mine, theirs in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


async def steady(port: Port, strategy: LocalSGD) -> tuple[float, float]:
    """Train one weight, whose gradient is 1 on worker 0 and a millionth on worker 1; return its moment, and
    the length of the next step."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.float64))])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    conductor: Conductor[Any] = Conductor(
        strategy, Replica(model, optimizer=optimizer), port, Ledger(port.rank, lambda: 0.0)
    )
    for _ in range(2):
        model[0].grad = torch.full((1,), 10.0 ** (-6 * port.rank), dtype=torch.float64)
        await conductor.begin()
        optimizer.step()
        await conductor.update()
    moment, before = optimizer.state[model[0]]["exp_avg"].item(), model[0].item()
    optimizer.step()
    return moment, before - model[0].item()


def test_a_mean_of_first_moments_is_limited_by_the_second_moment_here() -> None:
    """The mean is 0.095; worker 1 has √v = √(1 − 0.999²) · 10⁻⁶. Unlimited, its next step is 31,000 long."""
    (one, other), steps = (
        list(pair)
        for pair in zip(
            *(made for made, _ in virtually(steady, equal_workers(2), LocalSGD(period=1, first_moments=2))),
            strict=True,
        )
    )
    assert one == pytest.approx(0.19 * (1 + 1e-6) / 2)
    assert other == pytest.approx(KAPPA * (1 - 0.999**2) ** 0.5 * 1e-6)
    assert max(map(abs, steps)) < 0.2, "some learning rates of 0.1"


def test_adam_itself_keeps_to_the_limit_and_reaches_it() -> None:
    """Equality, in the limit, where the gradient of k steps ago is (β₁/β₂)^k."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight])
    for ago in reversed(range(60)):
        weight.grad = torch.full((1,), (0.9 / 0.999) ** ago, dtype=torch.float64)
        optimizer.step()
    state = optimizer.state[weight]
    before = state["exp_avg"].clone()
    limit_first_moments(Replica(nn.ParameterList([weight]), optimizer=optimizer))
    assert torch.equal(state["exp_avg"], before)
    assert before.item() == pytest.approx(KAPPA * state["exp_avg_sq"].sqrt().item(), rel=1e-4)


def test_adamax_itself_keeps_to_its_limit_and_reaches_it() -> None:
    """Equality, in the limit, where the gradient of k steps ago is β₂^−k: all of them are the maximum."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adamax([weight])
    for ago in reversed(range(300)):
        weight.grad = torch.full((1,), 0.999**-ago, dtype=torch.float64)
        optimizer.step()
    state = optimizer.state[weight]
    before = state["exp_avg"].clone()
    replica = Replica(nn.ParameterList([weight]), optimizer=optimizer)
    limit_first_moments(replica)
    assert torch.equal(state["exp_avg"], before)
    limit = state["exp_inf"].item() * 0.1 / (1 - 0.9 / 0.999)
    assert before.item() == pytest.approx(limit, rel=1e-6)
    state["exp_avg"].fill_(-100.0)
    limit_first_moments(replica)
    assert state["exp_avg"].item() == pytest.approx(-limit)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="first_moments"):
        LocalSGD(first_moments=0)
    with pytest.raises(SettingError, match="leave them local"):
        LocalSGD(second_moments=6).check_elastic(2)


# --- the whole state, the same on all workers


async def shared(port: Port, kind: str) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Take one step more than the rank says; return the moments before and after, and the counts of steps."""
    model = built()
    optimizer = optimizer_of(kind, model)
    replica = Replica(model, optimizer=optimizer)
    for step in range(port.rank + 1):
        set_gradients(model, port.rank, step)
        optimizer.step()
    before = moments_of(optimizer, model)
    assert is_shareable(replica)
    await share_state(replica, port)
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return before, moments_of(optimizer, model), counts


@pytest.mark.parametrize(("kind", "moments"), [("sgd", 1), ("adam", 2)])
def test_the_state_becomes_the_mean_and_a_parameter_that_some_lack_starts_anew(
    kind: str, moments: int
) -> None:
    workers = [made for made, _ in virtually(shared, equal_workers(WORLD), kind)]
    firsts = (before[:moments] for before, _, _ in workers)
    means = [torch.stack(each).mean(0) for each in zip(*firsts, strict=True)]
    for _, after, counts in workers:
        assert len(after) == moments, "worker 2 never had any of parameter 1"
        torch.testing.assert_close(after, means)
        assert all(map(torch.equal, after, workers[0][1]))
        assert counts == ([float(WORLD)] if kind == "adam" else []), "the largest"


@pytest.mark.parametrize(
    ("cls", "known"), [(torch.optim.RMSprop, True), (torch.optim.Adadelta, True), (torch.optim.Rprop, False)]
)
def test_only_known_state_is_shareable(cls: Any, known: bool) -> None:
    model = built()
    optimizer = cls(model.parameters(), lr=0.1)
    set_gradients(model, 0, 0)
    optimizer.step()
    assert is_shareable(Replica(model, optimizer=optimizer)) == known
