"""The codec setting of strategies: which codecs are taken, and which are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import ASP, BSP, DSSP, SSP, ErrorFeedback, PowerSGD, SettingError, TopK
from offbeat.core.settings import (
    build,
    parse_pairs,
)
from offbeat.strategies import STRATEGIES


def test_a_codec_from_a_command_line_and_back() -> None:
    made = build(BSP, parse_pairs(["codec=error_feedback(topk(0.01))"]))
    assert made == BSP(codec=ErrorFeedback(TopK(0.01)))
    assert made.settings() == {"codec": "error_feedback(topk(0.01))"}
    assert build(BSP, made.settings()) == made
    assert build(BSP, {"codec": "none"}) == build(BSP, {"codec": None}) == BSP()
    assert BSP().settings() == {"codec": None}
    with pytest.raises(SettingError, match="unknown codec 'zip'"):
        build(BSP, {"codec": "zip"})
    with pytest.raises(SettingError, match="a codec, such as"):
        BSP(codec=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", STRATEGIES.values(), ids=STRATEGIES)
def test_a_codec_is_taken_or_refused_with_a_reason(cls: Any) -> None:
    if "codec" in cls().settings():
        assert cls(codec=TopK(0.1)).codec == TopK(0.1)
        return
    for give in (
        lambda: cls(codec=TopK(0.1)),
        lambda: cls(codec=None),
        lambda: build(cls, {"codec": "half"}),
    ):
        with pytest.raises(SettingError, match=f"{cls.name} takes no codec: {cls.refused['codec']}"):
            give()


def test_matrices_cannot_be_cut_into_shards() -> None:
    for make in (ASP, SSP, DSSP):
        for codec in (PowerSGD(2), ErrorFeedback(PowerSGD(2))):
            with pytest.raises(SettingError, match="each shard of a server holds a slice"):
                make(codec=codec)
