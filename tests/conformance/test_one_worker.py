"""A world of one equals the plain loop, bit for bit, whatever the loop does."""

from __future__ import annotations

from torch import Tensor

from tests import loops
from tests.conformance import features
from tests.conformance.features import FEATURES, every_feature
from tests.conformance.table import AnyStrategy, every_strategy

STEPS = 10
Tensors = dict[str, Tensor]


def _both(feature: str, strategy: AnyStrategy) -> tuple[Tensors, Tensors, Tensors]:
    plain = FEATURES[feature].model(0)
    before = loops.tensors(plain)
    features.loop(feature, plain, plain, 0, STEPS)
    ours, _, _ = features.attached(feature, strategy, 0, STEPS)
    return before, loops.tensors(plain), loops.tensors(ours)


@every_strategy
@every_feature
def test_world_of_one_equals_plain_loop(crew, feature: str, strategy: AnyStrategy) -> None:
    before, plain, ours = crew(1).run(_both, feature, strategy)[0]
    assert loops.equal(plain, ours)
    assert not loops.equal(before, ours)
