"""OSP: every gradient counts once, in its own step's rate; what is late is predicted, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat
from offbeat import BSP, OSP, SettingError
from offbeat.blocks import Block, cut, trainable_bytes
from offbeat.late import packed, room
from offbeat.replica import Replica
from offbeat.splitting import UNKNOWN, least_important, marked_bytes, runs
from tests import loops
from tests.conformance.features import batch_norm

STEPS = 14
SIZES = (96, 64, 320, 128, 64, 256)  # floats of each parameter: 256 bytes and more, so each is a block


# --- the split, as numbers

importances = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, UNKNOWN, float("nan")]), min_size=1, max_size=9)


@settings(deadline=None)
@given(importances, st.data())
def test_the_least_important_that_fit_come_late(importance: list[float], data: st.DataObject) -> None:
    count = len(importance)
    nbytes = data.draw(st.lists(st.integers(1, 100), min_size=count, max_size=count))
    budget = data.draw(st.floats(0, 120 * count))
    pinned = data.draw(st.sets(st.integers(0, count - 1)))
    late = least_important(importance, nbytes, budget, pinned)
    assert late == sorted(set(late))
    assert len(late) < count, "one at least stays"
    assert sum(nbytes[i] for i in late) <= budget
    assert not pinned & set(late)
    assert all(importance[i] < UNKNOWN for i in late)
    candidates = [i for i in range(count) if i not in pinned and importance[i] < UNKNOWN]
    for i in set(candidates) - set(late):  # it did not fit beside the less important ones, or all would go
        before = [j for j in late if (importance[j], j) < (importance[i], i)]
        assert sum(nbytes[j] for j in before) + nbytes[i] > budget or len(late) == count - 1


def test_ties_go_by_index_and_what_does_not_fit_is_passed_over() -> None:
    assert least_important([1.0, 1.0, 1.0, 9.0], [10, 10, 10, 10], 20) == [0, 1]
    assert least_important([0.1, 0.2, 0.3, 9.0], [10, 90, 10, 10], 20) == [0, 2]
    assert least_important([0.1, 0.2], [10, 10], 0) == []
    assert least_important([0.1, 0.2], [10, 10], 100) == [0]


def _blocks(sizes: list[int], double: set[int] = frozenset()) -> list[Block]:  # type: ignore[assignment]
    dtypes = [torch.float64 if i in double else torch.float32 for i in range(len(sizes))]
    params = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in zip(sizes, dtypes, strict=True)]
    model = nn.ParameterList(params)
    replica = Replica(model, grain=(1, 1))
    replica.lay_out_gradients()
    return replica.blocks


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.data())
def test_what_stays_travels_in_runs_of_neighbours(sizes: list[int], data: st.DataObject) -> None:
    double = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    blocks = _blocks(sizes, double)
    late = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) - 1))
    first, others = data.draw(st.integers(1, 1000)), data.draw(st.integers(1, 3000))
    joined = runs(blocks, late, first, others)
    assert [i for run in joined for i in run] == [i for i in range(len(sizes)) if i not in late]
    for number, run in enumerate(joined):
        flat = blocks[run[0]].marked.as_strided((sum(blocks[i].marked.numel() for i in run),), (1,))
        at = flat.data_ptr()
        for i in run:
            assert blocks[i].marked.data_ptr() == at
            assert blocks[i].marked.dtype == flat.dtype
            at += blocks[i].marked.nbytes
        enough = first if number == 0 else others
        assert sum(marked_bytes(blocks[i]) for i in run[:-1]) < enough, "it ends once there is enough"
    if len(sizes) - 1 in late:
        assert len(joined[-1]) == 1, "little waits for the end of backward"


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.data())
def test_there_is_room_for_whatever_comes_late(sizes: list[int], data: st.DataObject) -> None:
    blocks = _blocks(sizes, data.draw(st.sets(st.integers(0, len(sizes) - 1))))
    budget = data.draw(st.floats(0, 1)) * sum(map(marked_bytes, blocks))
    importance = data.draw(st.permutations([float(i) for i in range(len(sizes))]))
    flats = room(blocks, budget)
    late = [blocks[i] for i in least_important(importance, list(map(marked_bytes, blocks)), budget)]
    parts = packed(flats, late, marked=True)
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    for number, (block, part) in enumerate(zip(late, parts, strict=True)):
        assert part.numel() == block.numel + len(block.params)
        assert part.dtype == block.weight.dtype
        assert (part == number + 1).all(), "parts do not overlap"
    for block in blocks:
        assert packed(flats, [block])[0].numel() == block.numel, "any single one fits, as scratch"


@pytest.mark.parametrize(
    "bad",
    [
        {"budget": -0.1},
        {"budget": 1.5},
        {"budget": "much"},
        {"budget": True},
        {"budget": float("nan")},
        {"growth": -1},
        {"growth": 2.5},
        {"importance": "size"},
        {"correction": "hope"},
        {"mix": 1.5},
        {"mix": "half"},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(bad))):
        OSP(**bad)


def test_batch_norm_has_blocks_of_its_own() -> None:
    strategy = OSP()
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)) for _ in range(5)))
    apart = strategy.apart(model)
    assert len(apart) == 10
    blocks = cut(model.named_parameters(), *strategy.grain(trainable_bytes(model)), apart)
    assert len(blocks) > 3
    for block in blocks:
        assert len({param in apart for param in block.params}) == 1
    assert not OSP(budget=0).apart(model)


# --- a loss that is linear in the weights: gradients are what the test says, whatever the weights are


class Linear(nn.Module):
    """Σ w·c over the parameters; those whose coefficients are None are not used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        start = [torch.randint(-8, 9, (n,), generator=generator).float() for n in SIZES]
        self.parts = nn.ParameterList([nn.Parameter(w) for w in start])

    def forward(self, coefficients: list[Tensor | None]) -> Tensor:
        used = [(p * c).sum() for p, c in zip(self.parts, coefficients, strict=True) if c is not None]
        return torch.stack(used).sum()


Coefficients = list[list[Tensor | None]]


def coefficients(rank: int, steps: int = STEPS) -> Coefficients:
    """Small whole numbers, other ones on every rank, larger for later parameters."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        [torch.randint(-4, 5, (n,), generator=generator).float() * 2**i for i, n in enumerate(SIZES)]
        for _ in range(steps)
    ]


def all_used(rank: int) -> Coefficients:
    return coefficients(rank)


def some_unused(rank: int) -> Coefficients:
    """One parameter is never used; others on one rank only, or on none, in some steps."""
    steps = coefficients(rank)
    for t, step in enumerate(steps):
        step[1] = None
        if t % 3 == rank:
            step[3] = None
        if t % 4 == 3:
            step[4] = None
    return steps


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, fused=True)


def by_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 2.0**-i} for i, p in enumerate(model.parameters())])


MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": plain,
    "fused": fused,
    "groups": by_group,
    "momentum": loops.momentum,
    "adamw": loops.adamw,
}


class Play:
    """A run on the linear loss, step by step."""

    def __init__(self, strategy: offbeat.Strategy[Any], optimizer: str = "plain") -> None:
        self.rank = dist.get_rank()
        self.model = Linear()
        self.optimizer = MAKE[optimizer](self.model)
        self.sync = offbeat.attach(self.model, self.optimizer, strategy, timeout_s=30)

    @property
    def state(self) -> Any:
        return self.sync._conductor.state

    @property
    def late(self) -> list[int]:
        """The parameters that come late in the step to come; blocks lie in backward order."""
        return sorted(len(SIZES) - 1 - i for i in getattr(self.state, "late", []))

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parts]

    def agreed(self) -> list[Tensor]:
        with self.sync.consensus():
            return self.weights()

    def backward(self, step: list[Tensor | None], scale: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.optimizer.zero_grad()
        scale(self.model(step)).backward()

    def step(self, step: list[Tensor | None]) -> None:
        self.backward(step)
        self.optimizer.step()


@contextmanager
def played(strategy: offbeat.Strategy[Any], optimizer: str = "plain") -> Iterator[Play]:
    play = Play(strategy, optimizer)
    with play.sync:
        yield play


def _trained(
    strategy: offbeat.Strategy[Any], optimizer: str, data: Callable[[int], Coefficients], schedule: bool
) -> tuple[list[Tensor], list[list[int]]]:
    lates = []
    with played(strategy, optimizer) as play:
        scheduler = torch.optim.lr_scheduler.StepLR(play.optimizer, 1, 0.5 if schedule else 1.0)
        for step in data(play.rank):
            lates.append(play.late)
            play.step(step)
            scheduler.step()
        return play.agreed(), lates


LATE = OSP(budget=0.7, growth=0)


@pytest.mark.parametrize("data", [all_used, some_unused])
@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize("schedule", [False, True], ids=["", "schedule"])
def test_where_gradients_do_not_depend_on_weights_it_is_bsp_bit_for_bit(
    crew, optimizer: str, schedule: bool, data: Callable[[int], Coefficients]
) -> None:
    """Each gradient once, at its own rate, and the optimizer's state as if nothing were ever predicted."""
    bsp = crew(2).run(_trained, BSP(), optimizer, data, schedule)[0][0]
    for weights, lates in crew(2).run(_trained, LATE, optimizer, data, schedule):
        assert sum(map(bool, lates)) > STEPS - 4
        assert all(map(torch.equal, weights, bsp))


@pytest.mark.parametrize("world", [2, 4])
def test_after_all_has_come_in_weights_are_the_closed_form(crew, world: int) -> None:
    """Plain SGD: w₀ − η Σ ḡ, exactly, since all numbers are short."""
    means = [sum(coefficients(r)[t][k] for r in range(world)) / world for t in range(STEPS) for k in range(6)]  # type: ignore[misc, arg-type]
    expected = [w.detach() - 0.5 * sum(means[k::6]) for k, w in enumerate(Linear().parts)]
    for weights, lates in crew(world).run(_trained, LATE, "plain", all_used, False):
        assert all(lates[4:])
        assert all(map(torch.equal, weights, expected))


IMPORTANCES = ["weight-gradient", "gradient", "random"]


@pytest.mark.parametrize("importance", IMPORTANCES)
def test_all_ranks_split_alike(crew, importance: str) -> None:
    strategy = OSP(budget=0.5, growth=0, importance=importance)
    (_, one), (_, other) = crew(2).run(_trained, strategy, "plain", all_used, False)
    assert one == other
    assert any(one)
    if importance == "random":
        assert len(set(map(tuple, one))) > 3
    if importance == "gradient":
        assert one[4] == [0, 1, 3, 4], "gradients double from one to the next; 2 is too large beside 0 and 1"


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.6, 1.0])
def test_the_budget_is_kept_and_used(crew, budget: float) -> None:
    sizes = [4 * n + 4 for n in SIZES]
    for _, lates in crew(2).run(_trained, OSP(budget=budget, growth=0), "plain", all_used, False):
        used = [sum(sizes[k] for k in late) for late in lates]
        assert max(used) <= budget * sum(sizes)
        left = budget * sum(sizes) - used[-1]
        assert all(sizes[k] > left for k in range(6) if k not in lates[-1]) or len(lates[-1]) == 5


def test_growth_is_linear(crew) -> None:
    _, lates = crew(2).run(_trained, OSP(budget=1.0, growth=10), "plain", all_used, False)[0]
    sizes = [4 * n + 4 for n in SIZES]
    for t, late in enumerate(lates):
        assert sum(sizes[k] for k in late) <= min(1.0, t / 10) * sum(sizes)
    assert len(lates[4]) < len(lates[-1]) == 5


def _predicted(correction: str) -> list[tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]]:
    seen = []
    with played(OSP(budget=0.7, growth=0, correction=correction)) as play:
        for step in coefficients(play.rank):
            late = play.late
            play.step(step)
            seen.append((late, play.weights(), play.agreed(), step))
    return seen  # type: ignore[return-value]


def test_a_prediction_is_off_by_what_the_local_gradient_is_off(crew) -> None:
    """ŵ_i − w = −η(g_i − ḡ) on U, and nothing on I; over the workers it averages to zero."""
    for (late, mine, w, g), (_, theirs, w_there, g_there) in zip(
        *crew(2).run(_predicted, "lgp"), strict=True
    ):
        for k in range(6):
            assert torch.equal(w[k], w_there[k])
            mean = (g[k] + g_there[k]) / 2
            for predicted, local in ((mine, g), (theirs, g_there)):
                off = predicted[k] - w[k]
                assert torch.equal(off, -0.5 * (local[k] - mean) if k in late else torch.zeros_like(off))
            assert not (mine[k] + theirs[k] - 2 * w[k]).any()


def test_without_correction_it_is_off_by_a_whole_step(crew) -> None:
    for (late, mine, w, g), (_, theirs, _, g_there) in zip(*crew(2).run(_predicted, "none"), strict=True):
        for k in late:
            assert torch.equal(mine[k], theirs[k])
            assert torch.equal(mine[k] - w[k], 0.5 * (g[k] + g_there[k]) / 2)


def test_the_mixed_prediction_leans_on_the_mean_of_all(crew) -> None:
    """ŵ = w − η((1 − mix)·g_i + mix·m), where m is the running mean of ḡ of the steps before."""
    one, other = crew(2).run(_predicted, "ema-lgp")
    means = [torch.zeros(n) for n in SIZES]
    for t, ((late, mine, w, g), (_, _, _, g_there)) in enumerate(zip(one, other, strict=True)):
        for k in range(6):
            mean = (g[k] + g_there[k]) / 2
            if k in late:
                before = w[k] + 0.5 * mean
                expected = before - 0.5 * (0.5 * g[k] + 0.5 * means[k])
                torch.testing.assert_close(mine[k], expected, rtol=1e-5, atol=1e-4)
            means[k] += (mean - means[k]) * max(0.1, 1 / (t + 1))


# --- what the loop does to gradients


def _clipped(norm: float) -> tuple[list[Tensor], list[list[int]]]:
    lates = []
    with played(LATE) as play:
        for step in coefficients(play.rank):
            lates.append(play.late)
            play.backward(step)
            nn.utils.clip_grad_norm_(play.model.parameters(), norm)
            play.optimizer.step()
        return play.agreed(), lates


@pytest.mark.parametrize("norm", [30.0, 1e6], ids=["clipped", "never reached"])
def test_clipping_by_norm_reaches_what_is_late_too(crew, norm: float) -> None:
    """The factor is that of the important part, the mean of which all workers clip alike."""
    (one, lates), (other, _) = crew(2).run(_clipped, norm)
    assert all(map(torch.equal, one, other))
    weights = [w.detach().double() for w in Linear().parts]
    for late, mine, theirs in zip(lates, coefficients(0), coefficients(1), strict=True):
        means = [(a.double() + b) / 2 for a, b in zip(mine, theirs, strict=True)]  # type: ignore[union-attr, operator]
        important = torch.cat([means[k] for k in range(6) if k not in late]).norm().item()
        factor = min(1.0, norm / (important + 1e-6))
        weights = [w - 0.5 * factor * mean for w, mean in zip(weights, means, strict=True)]
    for found, expected in zip(one, weights, strict=True):
        if norm == 1e6:
            assert torch.equal(found, expected.float()), "a factor of exactly 1"
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4)


BAD = 8


def _overflowing(optimizer: str, where: str) -> tuple[list[Tensor], float, list[bool], list[list[int]]]:
    """In one step one gradient of rank 1 is not finite; a late one, or an important one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    finite, lates = [], []
    with played(LATE, optimizer) as play:
        for t, step in enumerate(coefficients(play.rank)):
            late = play.late
            lates.append(late)
            if t == BAD and play.rank == 1:
                k = late[0] if where == "late" else next(k for k in range(6) if k not in late)
                spoilt = step[k]
                assert spoilt is not None
                spoilt[3] = torch.inf
            play.backward(step, scaler.scale)
            scaler.step(play.optimizer)
            scaler.update()
            finite.append(all(w.isfinite().all().item() for w in play.weights()))
        return play.agreed(), scaler.get_scale(), finite, lates


@pytest.mark.parametrize("where", ["late", "important"])
@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(crew, optimizer: str, where: str) -> None:
    (one, scale, finite, lates), (other, scale_there, finite_there, _) = crew(2).run(
        _overflowing, optimizer, where
    )
    assert lates[BAD]
    assert scale == scale_there == 32.0
    assert all(finite + finite_there)
    assert all(map(torch.equal, one, other))
    data = [coefficients(rank) for rank in (0, 1)]
    steps = [t for t in range(STEPS) if t != BAD]
    for k, start in enumerate(Linear().parts):
        expected = start.detach() - 0.5 * sum((data[0][t][k] + data[1][t][k]) / 2 for t in steps)  # type: ignore[operator]
        assert torch.equal(one[k], expected), "all other steps count, unscaled"


# --- real gradients


def _same_data(optimizer: str, schedule: bool) -> tuple[Tensor, Tensor, int]:
    """All ranks see the same batches: the plain loop, ours, and in how many steps something was late."""
    lates = []

    def train(model: nn.Module, opt: torch.optim.Optimizer, look: Callable[[int], None]) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5) if schedule else None
        loops.train(model, opt, loops.batches(0, STEPS), scheduler=scheduler, after_step=look)

    plain, ours = loops.mlp(), loops.mlp()
    train(plain, loops.OPTIMIZERS[optimizer](plain), lambda _: None)
    opt = loops.OPTIMIZERS[optimizer](ours)
    with offbeat.attach(ours, opt, LATE, timeout_s=30) as sync:
        train(ours, opt, lambda _: lates.append(len(sync._conductor.state.late)))
        with sync.consensus():
            return loops.flat(plain), loops.flat(ours), sum(map(bool, lates))


@pytest.mark.parametrize("optimizer", loops.OPTIMIZERS)
@pytest.mark.parametrize("schedule", [False, True], ids=["", "schedule"])
def test_the_same_data_everywhere_is_the_plain_loop(crew, optimizer: str, schedule: bool) -> None:
    """Then the local gradient is the mean (on two ranks to the bit), and a prediction is the step itself."""
    for plain, ours, splits in crew(2).run(_same_data, optimizer, schedule):
        assert splits > STEPS - 4
        assert torch.equal(plain, ours)


def _watched() -> tuple[list[set[str]], list[int]]:
    rank = dist.get_rank()
    model = batch_norm(rank)
    opt = loops.momentum(model)
    late: list[set[str]] = []
    memory: list[int] = []
    strategy = OSP(budget=1.0, growth=0, importance="random")  # by chance everything would be late some time
    with offbeat.attach(model, opt, strategy, timeout_s=30) as sync:

        def look(_: int) -> None:
            state, blocks = sync._conductor.state, sync._replica.blocks
            late.append({name for i in state.late for name in blocks[i].names})
            memory.append(hash(tuple(t.data_ptr() for t in [*state.behind.weights, *state.behind.grads])))

        loops.train(model, opt, loops.batches(rank, STEPS), after_step=look)
    return late, memory


def test_batch_norm_is_never_late_and_memory_is_taken_once(crew) -> None:
    for late, memory in crew(2).run(_watched):
        assert all(names == {"0.weight", "0.bias", "3.weight", "3.bias"} for names in late)
        assert len(set(memory)) == 1
