"""Staging: tensors of the CPU travel from where they are; those of a GPU through pinned memory."""

from __future__ import annotations

import pytest
import torch

from offbeat.worlds.processes.server.staging import Staging

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("own_copy", [False, True])
def test_tensors_of_the_cpu_are_not_copied(own_copy: bool) -> None:
    tensors = [torch.arange(4.0), torch.zeros(0)]
    sent, ready = Staging().send(tensors, own_copy)
    ready()
    assert all(one is other for one, other in zip(sent, tensors, strict=True))
    room, land = Staging().receive(tensors)
    room[0].fill_(7)
    land()
    assert tensors[0].tolist() == [7.0] * 4
    assert Staging().send([])[0] == []


@gpu
def test_what_a_gpu_computes_is_complete_before_it_is_sent() -> None:
    staging, values = Staging(), torch.arange(1 << 20, dtype=torch.float64, device="cuda")
    sent, ready = staging.send([values * 2])
    ready()
    assert sent[0].is_pinned() and torch.equal(sent[0], values.cpu() * 2)
    again, ready = staging.send([values * 3])
    ready()
    assert again[0] is sent[0], "the memory is used again"
    own, _ = staging.send([values], own_copy=True)
    assert own[0] is not sent[0] and torch.equal(own[0], values.cpu())


@gpu
def test_what_is_received_lands_on_the_gpu() -> None:
    staging, into = Staging(), torch.zeros(5, device="cuda")
    room, land = staging.receive([into])
    room[0].copy_(torch.arange(5.0))
    land()
    assert into.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
