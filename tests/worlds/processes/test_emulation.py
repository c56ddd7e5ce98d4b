"""Pacing sleeps as the schedule says, by a clock that the tests hold, and changes nothing else."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat.core.units import parse_rate
from offbeat.errors import SettingError
from offbeat.worlds.processes.emulation import Pacing, pace, slow


@dataclass
class FakeClock:
    """Time passes when somebody sleeps, by `oversleep_s` too much, or when a test says so."""

    now: float = 100.0
    oversleep_s: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0.0
        self.slept.append(seconds)
        self.now += seconds + self.oversleep_s


class Work(nn.Module):
    """A layer with a matrix whose forward takes `seconds` of the fake clock."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        return x @ self.weight


class Recurrent(nn.Linear):
    """One step of what nn.LSTM computes and returns; that one itself needs AVX-512 for bfloat16."""

    def __init__(self) -> None:
        super().__init__(3, 4 * 3)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        enter, forget, leave, seen = super().forward(x).chunk(4, dim=-1)
        cell = enter.sigmoid() * seen.tanh() + forget.sigmoid()
        hidden = leave.sigmoid() * cell.tanh()
        return hidden.clone(), (hidden, cell)


class TwoOutputs(nn.Module):
    """A layer whose outputs come in nested containers, used by different ways to the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = Recurrent()

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.recurrent(x)
        total: Tensor = out.sum() + 2 * hidden.sum() + 3 * cell.sum()
        return total


def mlp(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth)))


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(144, 3),
    )


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)
    )


def inputs(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    first = next(model.children())
    if isinstance(first, nn.Embedding):
        return torch.randint(11, (2, 5))
    return torch.randn(2, 1, 8, 8) if isinstance(first, nn.Conv2d) else torch.randn(5, 3)


def train(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    """One forward and backward; the output, and the gradients in the order of the parameters."""
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(inputs(model))
    output.float().square().sum().backward()
    return [output, *(p.grad for p in model.parameters() if p.grad is not None)]


def ready_times(model: nn.Module, clock: FakeClock, start: float) -> dict[str, float]:
    """Seconds from `start` to each parameter's gradient, filled while `model` trains."""
    times: dict[str, float] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda _: times.__setitem__(name, clock.now - start)

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(note(name))
    return times


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def paced(model: nn.Module, seconds: float, clock: FakeClock, **more: object) -> Pacing:
    return pace(model, seconds, clock=clock, sleep=clock.sleep, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("build", [mlp, convolutional, transformer, TwoOutputs])
@pytest.mark.parametrize("slower", [paced, lambda model, factor, clock: slow(model, factor, clock=clock)])
def test_outputs_and_gradients_are_the_same_bit_for_bit(
    build: Callable[[], nn.Module], slower: Callable[..., Pacing], autocast: bool, clock: FakeClock
) -> None:
    plain, other = build(), build()
    slower(other, 3.0, clock)
    for expected, found in zip(train(plain, autocast), train(other, autocast), strict=True):
        assert torch.equal(expected, found)
    for expected, found in zip(plain.buffers(), other.buffers(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("factor", [1.0, 0.5, 4.0])
@pytest.mark.parametrize("depth", [1, 4])
def test_each_gradient_is_ready_when_the_shares_up_to_it_have_passed(
    clock: FakeClock, depth: int, factor: float
) -> None:
    model = mlp(depth)
    paced(model, 6.0, clock, factor=factor)
    times = ready_times(model, clock, clock.now)
    output = model(inputs(model))
    assert clock.now == pytest.approx(100.0 + factor * 2.0, abs=1e-9)
    output.sum().backward()
    assert clock.now == pytest.approx(100.0 + factor * 6.0, abs=1e-9)
    for layer in range(depth):
        expected = factor * (2.0 + 4.0 * (depth - layer) / depth)
        assert times[f"{layer}.weight"] == pytest.approx(expected, abs=1e-9)
        assert times[f"{layer}.bias"] == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(seconds=st.floats(1e-3, 1e3), weights=st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3))
def test_explicit_weights_divide_the_time(seconds: float, weights: list[float]) -> None:
    if sum(weights) < 1e-3:
        return
    clock, model = FakeClock(), mlp(3)
    paced(model, seconds, clock, weights={str(layer): weight for layer, weight in enumerate(weights)})
    times = ready_times(model, clock, clock.now)
    train(model)
    for layer in range(3):
        expected = seconds * (1 + 2 * sum(weights[layer:]) / sum(weights)) / 3
        assert times[f"{layer}.weight"] == pytest.approx(expected, abs=1e-9)


def test_norms_take_no_share_and_attention_is_one_layer(clock: FakeClock) -> None:
    model = (
        transformer()
    )  # embedding, attention, two linear layers of the encoder, the last: five equal shares
    paced(model, 15.0, clock)
    times = ready_times(model, clock, clock.now)
    train(model)
    ends = {"2.weight": 7, "1.norm2.weight": 7, "1.linear2.weight": 9, "1.linear1.weight": 11}
    ends |= {"1.self_attn.in_proj_weight": 13, "1.self_attn.out_proj.weight": 13, "0.weight": 15}
    assert {name: times[name] for name in ends} == pytest.approx(ends)


def test_a_model_of_vectors_only_is_paced_too(clock: FakeClock) -> None:
    paced(model := nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3)), 6.0, clock)
    train(model)
    assert clock.slept == pytest.approx([1.0, 1.0, 2.0, 2.0])


def test_real_computation_is_inside_the_pace_and_oversleeping_does_not_add_up(clock: FakeClock) -> None:
    clock.oversleep_s = 0.01
    model = nn.Sequential(
        Work(clock, 0.5), Work(clock, 1.5), Work(clock, 0.0)
    )  # the second is late for its 1.0
    paced(model, 9.0, clock)
    train(model)
    assert clock.slept == pytest.approx([0.5, 0.49, 2.0, 1.99, 1.99])
    assert clock.now == pytest.approx(109.0 + 2 * 0.01)  # the last of the forward, the last of the backward


def test_without_gradients_or_in_eval_mode_nothing_is_paced(clock: FakeClock) -> None:
    paced(model := mlp(), 6.0, clock)
    with torch.no_grad():
        model(inputs(model))
    model.eval()
    train(model)
    assert not clock.slept


def test_every_forward_of_a_step_is_paced_and_each_of_their_backwards(clock: FakeClock) -> None:
    paced(model := mlp(), 6.0, clock)
    first = model(inputs(model))
    clock.now += 50.0  # loading data between two forwards is nobody's computation
    second = model(inputs(model))
    assert sum(clock.slept) == pytest.approx(2 * 2.0)
    (first.sum() + second.sum()).backward()
    assert sum(clock.slept) == pytest.approx(2 * 6.0)
    train(model)
    assert sum(clock.slept) == pytest.approx(3 * 6.0)


def test_a_second_backward_of_one_graph_is_paced_again(clock: FakeClock) -> None:
    paced(model := mlp(), 6.0, clock)
    loss = model(inputs(model)).sum()
    loss.backward(retain_graph=True)
    model(inputs(model))
    before = clock.now
    loss.backward()
    assert clock.now - before == pytest.approx(4.0)


def test_layers_called_past_the_model_are_paced(clock: FakeClock) -> None:
    paced(model := mlp(2), 6.0, clock)
    for _ in range(2):
        model[1](model[0](inputs(model))).sum().backward()
        clock.now += 50.0
    assert clock.slept == pytest.approx([1.0, 1.0, 2.0, 2.0] * 2)


def test_a_layer_of_several_outputs_is_charged_once(clock: FakeClock) -> None:
    paced(model := TwoOutputs(), 6.0, clock)
    train(model)
    assert clock.slept == pytest.approx([2.0, 4.0])


def test_recomputed_layers_take_their_forward_again(clock: FakeClock) -> None:
    paced(model := mlp(2), 6.0, clock)
    x = inputs(model).requires_grad_()
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert sum(clock.slept) == pytest.approx(6.0 + 2.0)


def test_slow_stretches_what_each_layer_took(clock: FakeClock) -> None:
    model = nn.Sequential(Work(clock, 1.0), Work(clock, 3.0))
    slow(model, 2.5, clock=clock, sleep=clock.sleep)
    train(model)
    assert clock.slept == pytest.approx([1.5, 4.5, 9.0, 3.0])


def test_slow_takes_back_what_it_overslept(clock: FakeClock) -> None:
    clock.oversleep_s = 0.25
    model = nn.Sequential(*(Work(clock, 1.0) for _ in range(4)))
    slow(model, 2.0, clock=clock, sleep=clock.sleep)
    train(model)
    assert clock.slept == pytest.approx([1.0, 0.75, 0.75, 0.75, 2.0, 1.75, 1.75, 1.75])


def test_a_factor_of_one_does_not_slow(clock: FakeClock) -> None:
    slow(model := nn.Sequential(Work(clock, 1.0)), 1.0, clock=clock, sleep=clock.sleep)
    train(model)
    assert not clock.slept


def test_removal_leaves_the_model_as_it_was(clock: FakeClock) -> None:
    model = convolutional()
    before = set(model.__dict__), list(model.state_dict())
    with paced(model, 6.0, clock) as pacing:
        assert any(module._forward_hooks for module in model.modules())
    pacing.remove()
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    assert (set(model.__dict__), list(model.state_dict())) == before
    train(model)
    assert not clock.slept


def test_a_copy_of_a_paced_model_is_paced_for_itself(clock: FakeClock) -> None:
    pacing = paced(model := mlp(), 6.0, clock)
    twin = copy.deepcopy(model)
    pacing.remove()
    for expected, found in zip(train(model), train(twin), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda: pace(mlp(), 0.0), "seconds above 0"),
        (lambda: pace(mlp(), math.nan), "seconds above 0"),
        (lambda: pace(mlp(), 1.0, factor=-1.0), "above 0"),
        (lambda: pace(mlp(), 1.0, weights={"9": 1.0}), "the layers are 0, 1, 2, 3"),
        (lambda: pace(mlp(), 1.0, weights={"0": 0.0}), "not all 0"),
        (lambda: pace(nn.ReLU(), 1.0), "ReLU has no layer"),
        (lambda: slow(mlp(), 0.5), "1 or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: Callable[[], Pacing], word: str) -> None:
    with pytest.raises(SettingError, match=word):
        change()


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 1e9),
        ("200mbit", 2e8),
        ("100kbit", 1e5),
        ("2.5Gbit", 2.5e9),
        (" 1 tbit ", 1e12),
        ("64000", 64e3),
        ("1e6", 1e6),
        (1000, 1e3),
        (1.5e9, 1.5e9),
    ],
)
def test_rates_as_people_write_them(text: str | float, bits: float) -> None:
    assert parse_rate(text) == bits


@settings(deadline=None)
@given(bits=st.floats(1e-3, 1e15))
def test_a_number_is_bits_per_second(bits: float) -> None:
    assert parse_rate(bits) == parse_rate(str(bits)) == parse_rate(f"{bits!r}bit") == bits


@pytest.mark.parametrize(
    "text", ["", "fast", "gbit", "0", "-1gbit", "1gbps", "1GB", "1..2mbit", "nan", "inf", "1e999"]
)
def test_what_is_no_rate_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(SettingError, match="kbit, mbit, gbit"):
        parse_rate(text)


@settings(deadline=None)
@given(text=st.text(max_size=12))
def test_any_text_is_a_rate_or_a_setting_error(text: str) -> None:
    try:
        assert 0.0 < parse_rate(text) < math.inf
    except SettingError as error:
        assert repr(text) in str(error)
