"""What a step would wait for, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.strategies.osp.split import BACKWARD_SEND_FRACTION, waiting_s

BLOCKS = 8
NBYTES = [100] * BLOCKS
ALONE = [[i] for i in range(BLOCKS)]
TOTAL = float(sum(NBYTES))


def stay(late: list[int]) -> list[list[int]]:
    return [[i] for i in range(BLOCKS) if i not in late]


def test_what_is_sent_as_backward_goes_hides_but_for_the_last() -> None:
    """A network that is faster than backward rests between blocks."""
    assert waiting_s(ALONE, [], NBYTES, 10.0, 100 * TOTAL) == pytest.approx(0.01 / BLOCKS)


def test_a_slow_network_is_waited_for_from_the_first_gradient_on() -> None:
    first = 10.0 * (1 - BACKWARD_SEND_FRACTION + BACKWARD_SEND_FRACTION / BLOCKS)
    assert waiting_s(ALONE, [], NBYTES, 10.0, TOTAL / 30) == pytest.approx(first + 30.0 - 10.0)


def test_one_run_hides_nothing() -> None:
    assert waiting_s([list(range(BLOCKS))], [], NBYTES, 10.0, TOTAL / 30) == pytest.approx(30.0)


def test_what_is_late_has_the_network_while_nothing_else_is_there() -> None:
    late = [0, 1, 2, 3]
    assert waiting_s(stay(late), late, NBYTES, 10.0, TOTAL / 30) == pytest.approx(30.0 - 10.0)
    fifth = 10.0 * (
        1 - BACKWARD_SEND_FRACTION + BACKWARD_SEND_FRACTION * 5 / BLOCKS
    )  # is ready after what is late has come, in fewer bytes
    assert waiting_s(stay(late), late, NBYTES, 10.0, TOTAL / 30, 0.5) == pytest.approx(fifth + 15.0 - 10.0)


def test_the_last_run_is_sent_when_backward_ends_even_if_its_gradients_are_ready_before() -> None:
    late = [6, 7]
    assert waiting_s(stay(late), late, NBYTES, 10.0, 100 * TOTAL) == pytest.approx(0.01 / BLOCKS)


@given(
    late=st.lists(st.integers(0, BLOCKS - 2), unique=True),
    compute_s=st.floats(0.1, 10),
    bytes_per_s=st.floats(10, 1e4),
)
def test_it_lies_between_what_the_bytes_take_and_no_overlap_at_all(
    late: list[int], compute_s: float, bytes_per_s: float
) -> None:
    waited = waiting_s(stay(late), late, NBYTES, compute_s, bytes_per_s)
    assert TOTAL / bytes_per_s - compute_s <= waited + 1e-9
    assert waited <= TOTAL / bytes_per_s + 1e-9
