"""Staging of tensors that are in host memory does nothing; that of a GPU copies piece by piece."""

from __future__ import annotations

import pytest
import torch

from offbeat.worlds.processes.staging import GpuStaging, Staging


def test_tensors_of_the_host_need_no_copies() -> None:
    staging = Staging()
    staging.read([(0, 4), (4, 8)])
    staging.wait()
    staging.wait()
    staging.write(0, 8)
    staging.read_all()
    staging.write_all()
    staging.finish()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pieces_are_copied_there_and_back() -> None:
    sent, received = torch.arange(8.0, device="cuda"), torch.zeros(8, device="cuda")
    host = torch.zeros(8, pin_memory=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        staging = GpuStaging(stream, [(sent, host)], [(host, received)])
        staging.read([(0, 4), (4, 8)])
        for start in (0, 4):
            staging.wait()
            host[start : start + 4] *= 2
            staging.write(start, start + 4)
        staging.finish()
    assert torch.equal(received, 2 * sent)
