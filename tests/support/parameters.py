"""Parameters of any shape and dtype, for tests of blocks and replicas."""

from __future__ import annotations

from collections import defaultdict

import torch
from hypothesis import strategies as st
from torch import nn

from offbeat.core.blocks import Block

Named = list[tuple[str, nn.Parameter]]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]

shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)


def named_parameters(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> Named:
    """Draw parameters of these shapes and dtypes, and name them p0, p1, and so on."""
    torch.manual_seed(0)
    return [
        (f"p{i}", nn.Parameter(torch.randn(shape, dtype=dtype))) for i, (shape, dtype) in enumerate(kinds)
    ]


def by_dtype(blocks: list[Block]) -> dict[torch.dtype, list[Block]]:
    """Group blocks by the dtype of their parameters."""
    grouped = defaultdict(list)
    for block in blocks:
        grouped[block.params[0].dtype].append(block)
    return grouped
