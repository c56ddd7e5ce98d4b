"""The outer state of one owner: which slices it has, and how it steps them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.partition import WHOLE, EvenSlice
from offbeat.strategies.diloco.outer_state import OuterState, is_offloaded, owned_slices


@given(lines=st.integers(0, 30), fragments=st.integers(1, 5), world=st.integers(1, 5))
def test_owners_have_every_weight_once(lines: int, fragments: int, world: int) -> None:
    flat = torch.zeros(16 * lines)
    for rank in range(world):
        for part in owned_slices(fragments, EvenSlice(rank, world))(flat):
            part.add_(1)
    assert (flat == 1).all()


def _state(numel: int, momentum: bool = True, average: bool = False) -> OuterState:
    state = OuterState()
    weights = [torch.linspace(1, 2, numel, dtype=torch.float64)]
    state.allocate(weights, owned_slices(1, WHOLE), momentum=momentum, average=average, offload=False)
    return state


@pytest.mark.parametrize("is_change", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_is_nesterovs(momentum: float, is_change: bool) -> None:
    state, lr = _state(5, momentum > 0), 0.7
    w, v = torch.linspace(1, 2, 5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for mean in torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        outer_gradient = w - mean
        v = momentum * v + outer_gradient
        expected = w - lr * (outer_gradient + momentum * v)
        proposed = mean - w if is_change else mean.clone()
        state.propose(0, 0, proposed, lr, momentum, is_change)
        torch.testing.assert_close(proposed, expected)
        assert torch.equal(state.published[0][0], w), "until it is accepted, nothing changes"
        state.accept(0, 0, proposed, None)
        assert torch.equal(state.published[0][0], proposed)
        w = proposed


def test_a_mean_of_what_was_accepted_is_published() -> None:
    state = _state(4, average=True)
    one, two = torch.full((4,), 3.0, dtype=torch.float64), torch.full((4,), 6.0, dtype=torch.float64)
    state.accept(0, 0, one, 1.0)
    state.accept(0, 0, two, 0.25)
    assert torch.equal(state.published[0][0], torch.full((4,), 3.75, dtype=torch.float64))
    assert torch.equal(state.w_global[0][0], two)


def test_state_beside_the_weights_is_not_offloaded() -> None:
    state = _state(4)
    assert not is_offloaded(state.w_global[0][0], torch.zeros(4))
    assert is_offloaded(state.w_global[0][0], torch.zeros(4, device="meta"))
