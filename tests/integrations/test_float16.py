"""Float16 with a GradScaler on a GPU, which two ranks share, through each framework and without one.

On CPUs, where no framework has float16, the modules of tests beside this one let them compute in it.
"""

from __future__ import annotations

import pytest
import torch

from tests.integrations.conformance import Outcomes, in_float16
from tests.integrations.conformance import (
    test_bsp_is_ddp_where_scalers_skip as test_bsp_is_ddp_where_scalers_skip,
)
from tests.integrations.conformance import (
    test_ranks_with_scalers_that_skip_train as test_ranks_with_scalers_that_skip_train,
)
from tests.integrations.conftest import run_ways

pytestmark = pytest.mark.processes

FRAMEWORKS = {
    "accelerate_loop": "accelerate",
    "lightning_loop": "lightning",
    "transformers_loop": "transformers",
    "plain_loop": "torch",
}


@pytest.fixture(scope="module", params=list(FRAMEWORKS))
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run a framework's loop on the GPU; what each rank has come to."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip(FRAMEWORKS[request.param])
    return run_ways(request.param, in_float16("cuda"), tmp_path_factory.mktemp(request.param))
