"""OSP with a codec on its background stage: nothing else changes, also over a checkpoint in mid-flight."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from offbeat import OSP, ErrorFeedback, PowerSGD, SettingError, TopK
from tests.support import loops
from tests.support.osp_linear import LATE, MAKE, all_used, some_unused, trained_by_osp
from tests.support.resumed import resumed_run, straight_run

pytestmark = pytest.mark.processes

FEEDBACK = ErrorFeedback(TopK(0.25))


@pytest.mark.parametrize("data", [all_used, some_unused])
@pytest.mark.parametrize("optimizer", MAKE)
def test_a_codec_that_loses_nothing_changes_nothing(crew, optimizer: str, data) -> None:
    """To the bit, with two ranks: also which parameters nobody has a gradient for."""
    plain = crew(2).run(trained_by_osp, LATE, optimizer, data, False)
    for codec in (TopK(1.0), ErrorFeedback(TopK(1.0))):
        strategy = OSP(budget=0.7, growth=0, codec=codec)
        for (weights, lates), (expected, as_late) in zip(
            crew(2).run(trained_by_osp, strategy, optimizer, data, False), plain, strict=True
        ):
            assert lates == as_late
            assert any(lates)
            assert all(map(torch.equal, weights, expected))


def test_stopped_with_packets_in_flight_and_resumed(crew) -> None:
    strategy = OSP(budget=0.7, growth=0, codec=FEEDBACK)
    straight = crew(2).run(straight_run, strategy, "momentum")
    for stop in (2, 3, 5):
        for one, other in zip(straight, crew(2).run(resumed_run, strategy, "momentum", stop), strict=True):
            assert loops.equal(one, other), stop


def _sent(strategy: OSP) -> tuple[int, bool]:
    model, metrics = loops.attached(dist.get_rank(), strategy, "sgd", 12)
    return metrics.bytes_sent, bool(loops.flat(model).isfinite().all())


def test_the_background_stage_sends_less(crew) -> None:
    dense, sparse, factored = (
        crew(2).run(_sent, OSP(budget=0.7, growth=0, codec=codec)) for codec in (None, FEEDBACK, PowerSGD(1))
    )
    for (whole, _), (ours, finite), (theirs, as_finite) in zip(dense, sparse, factored, strict=True):
        assert ours < whole and theirs < whole
        assert finite and as_finite


def test_a_server_that_adds_up_takes_no_packets() -> None:
    with pytest.raises(SettingError, match='not with on="server"'):
        OSP(on="server", codec=FEEDBACK)
