"""fast_no_grad: torch.no_grad, entered often."""

from __future__ import annotations

import pytest
import torch

from offbeat.core.no_grad import fast_no_grad


def test_autograd_records_nothing_inside_and_everything_after() -> None:
    x = torch.ones(2, requires_grad=True)
    with fast_no_grad():
        assert not (2 * x).requires_grad
        with fast_no_grad():
            assert not (2 * x).requires_grad
        assert not (2 * x).requires_grad, "the inner one gives back what it found"
    assert (2 * x).requires_grad


def test_it_leaves_an_outer_no_grad_alone() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        with fast_no_grad():
            pass
        assert not (2 * x).requires_grad


def test_after_an_error_autograd_records_again() -> None:
    with pytest.raises(ZeroDivisionError), fast_no_grad():
        _ = 1 / 0
    assert torch.is_grad_enabled()
