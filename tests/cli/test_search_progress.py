"""Progress of `offbeat plan`: outcomes are told one by one, unless --quiet is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import command

pytestmark = pytest.mark.virtual


def test_outcomes_are_told_unless_quiet(tmp_path: Path) -> None:
    small = ("--workers", 2, "--steps", 4, "--evaluate-every", 2, "--strategies", "ssp", "--target", 27)
    args = ("plan", "quadratic", "--cluster", "slow-lan", *small, "--out")
    loud, quiet = command(*args, tmp_path / "a.toml"), command(*args, tmp_path / "b.toml", "-q")
    assert loud.code == quiet.code == 0
    assert "1 of 3: bsp, seed 0: " in loud.out
    assert "1 of 3: " not in quiet.out
    assert "chosen: " in quiet.out


def test_the_reason_of_a_failure_is_told_whole(tmp_path: Path) -> None:
    small = ("--workers", 4, "--steps", 8, "--evaluate-every", 2, "--strategies", "local_sgd", "--target", 27)
    failing = ("--mtbf", "2h", "--rejoin", "90s", "--most-seeds", 1)
    said = command(
        "plan", "quadratic", "-c", "slow-lan", *small, *failing, "--out", tmp_path / "a.toml", "-q"
    )
    assert said.code == 0, said.err
    reason = "a lost owner's slice cannot be sent again; use a codec of one phase, such as TopK"
    assert " ".join(said.out.split()).count(reason) == 2, "one for each candidate with such a codec"
