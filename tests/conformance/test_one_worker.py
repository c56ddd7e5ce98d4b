"""A world of one equals the plain loop, whatever the loop does: bit for bit, through a server to rounding.

Where that holds under plain SGD only, every feature runs under plain SGD.
"""

from __future__ import annotations

from torch import Tensor

from tests.conformance import features
from tests.conformance.features import FEATURES, every_feature
from tests.conformance.table import AnyStrategy, Case, every_case
from tests.support import loops

STEPS = 8
Tensors = dict[str, Tensor]


def _both(feature: str, strategy: AnyStrategy, optimizer: str | None) -> tuple[Tensors, Tensors, Tensors]:
    plain = FEATURES[feature].model(0)
    before = loops.tensors(plain)
    make = loops.OPTIMIZERS[optimizer or FEATURES[feature].optimizer]
    features.loop(feature, plain, plain, 0, STEPS, optimizer=make(plain))
    ours, _, _ = features.attached(feature, strategy, 0, STEPS, make=make)
    return before, loops.tensors(plain), loops.tensors(ours)


@every_case
@every_feature
def test_world_of_one_equals_plain_loop(crew, feature: str, case: Case) -> None:
    wanted = (case.alone, "sgd") if case.alone else (case.strategy, None)
    before, plain, ours = crew(1).run(_both, feature, *wanted)[0]
    assert case.same(plain, ours)
    assert not loops.equal(before, ours)
