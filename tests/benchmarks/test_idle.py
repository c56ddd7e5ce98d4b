"""Idle cores, from samples of what the system counts."""

from __future__ import annotations

import pytest
from benchmarks.support import idle
from benchmarks.support.idle import IdleCores


def test_the_share_is_of_the_span_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "cores", lambda: 2)
    sampled = IdleCores()
    # All idle for 10 s, one of two cores for 10 s, none for 10 s.
    sampled._samples = [(0.0, 0.0), (10.0, 20.0), (20.0, 30.0), (30.0, 30.0)]
    assert sampled.share(30.0, 20.0) == 1.0
    assert sampled.share(20.0, 10.0) == 0.5
    assert sampled.share(10.0, 0.0) == 0.0
    assert sampled.share(5.0, 4.0) == 0.5, "without two samples inside: all of the time"


def test_samples_are_taken_at_both_ends() -> None:
    with IdleCores() as sampled:
        pass
    assert len(sampled._samples) >= 2 and sampled._samples[-1][1] - sampled._samples[0][1] >= 0.0
