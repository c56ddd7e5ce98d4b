"""Tensors in host memory need no copies; those of a GPU are copied piece by piece."""

from __future__ import annotations

import pytest
import torch

from offbeat.worlds.processes.gpu_copies import GpuCopies, NoCopies


def test_tensors_of_the_host_need_no_copies() -> None:
    copying = NoCopies()
    copying.read([(0, 4), (4, 8)])
    copying.wait()
    copying.wait()
    copying.write(0, 8)
    copying.read_all()
    copying.write_all()
    copying.finish()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pieces_are_copied_there_and_back() -> None:
    sent, received = torch.arange(8.0, device="cuda"), torch.zeros(8, device="cuda")
    host = torch.zeros(8, pin_memory=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copying = GpuCopies(stream, [(sent, host)], [(host, received)])
        copying.read([(0, 4), (4, 8)])
        for start in (0, 4):
            copying.wait()
            host[start : start + 4] *= 2
            copying.write(start, start + 4)
        copying.finish()
    assert torch.equal(received, 2 * sent)
