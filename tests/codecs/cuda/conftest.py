"""Fixtures of the tests of GPU kernels, which Triton's interpreter runs without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from offbeat.codecs.cuda import ops
from offbeat.codecs.cuda import topk as cuda_topk

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


@pytest.fixture(autouse=True)
def triton() -> None:
    """Skip where Triton is missing: it comes with torch's builds for CUDA."""
    pytest.importorskip("triton", reason="Triton is not installed: it comes with torch's builds for CUDA")


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run few and large programs: the interpreter takes as long for one entry as for thousands."""
    monkeypatch.setattr(cuda_topk, "COUNTERS", 3)
    monkeypatch.setattr(cuda_topk, "COUNTED", 1 << 14)
    monkeypatch.setattr(cuda_topk, "SELECTED", 1 << 13)


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let codecs leave all they can to the kernels, as on a GPU."""
    monkeypatch.setattr(
        ops, "supports", lambda entries: entries.dtype == torch.float32 and entries.numel() > 0
    )
