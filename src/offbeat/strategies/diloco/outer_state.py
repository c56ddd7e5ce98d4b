"""Outer state of DiLoCo: the slices of the global weights, momentum and published mean that a worker owns.

    flat weights     │ fragment 0        │ fragment 1        │     each with an even slice for every owner
    owned by rank 0    ░░░░░░              ░░░░░░                  of three

Owners are all workers, one slice each, as in ZeRO-1; or every worker owns everything, as a slice of one. With
`offload` the state lies in host memory, pinned where the weights are on a GPU, and is stepped there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.partition import EvenSlice

SlicesOf = Callable[[Tensor], list[Tensor]]


@dataclass
class OuterState:
    """The outer weights of one worker. Lists have an item per flat tensor, and in it one per fragment."""

    w_global: list[list[Tensor]] = field(default_factory=list)
    velocity: list[list[Tensor]] = field(default_factory=list)
    averaged: list[list[Tensor]] = field(default_factory=list)  # w̄, if it is not w_global

    def __post_init__(self) -> None:
        self._host_buffers: dict[torch.dtype, Tensor] = {}  # of an offloaded step; not saved in checkpoints

    def allocate(
        self, weights: list[Tensor], owned: SlicesOf, *, momentum: bool, average: bool, offload: bool
    ) -> None:
        """Copy the owned slices of `weights`; `owned` returns those of a flat tensor, one per fragment."""
        slices = [owned(flat) for flat in weights]
        self.w_global = [[_like(part, offload).copy_(part) for part in parts] for parts in slices]
        if momentum:
            self.velocity = [[_like(part, offload).zero_() for part in parts] for parts in slices]
        if average:
            self.averaged = [[_like(part, offload).copy_(part) for part in parts] for parts in slices]

    @property
    def published(self) -> list[list[Tensor]]:
        """The weights that are published: w̄, or w_global; empty before the first step."""
        return self.averaged or self.w_global

    def propose(
        self, kind: int, index: int, given: Tensor, lr: float, momentum: float, is_change: bool = False
    ) -> None:
        """Replace `given`, the mean weights or their change, by the next w_global; step the momentum.

        w_global itself stays as it is until `accept`: evaluations in between publish it.
        """
        w_global = self.w_global[kind][index]
        value = given
        if is_offloaded(w_global, given):
            value = self._host_buffer(w_global).copy_(given)
        if not is_change and not momentum:
            torch.lerp(w_global, value, lr, out=value)
        else:
            change = value if is_change else value.sub_(w_global)  # −Δ
            if momentum:
                velocity = self.velocity[kind][index]
                torch.add(change, velocity, alpha=momentum, out=velocity)
                torch.add(w_global, change, alpha=lr, out=value)
                value.add_(velocity, alpha=lr * momentum)
            else:
                torch.add(w_global, change, alpha=lr, out=value)
        if value is not given:
            given.copy_(value)

    def accept(self, kind: int, index: int, proposed: Tensor, latest: float | None) -> None:
        """Make `proposed` the global weights; average it into the published mean with the weight `latest`."""
        w_global = self.w_global[kind][index].copy_(proposed)
        if latest is not None:
            self.averaged[kind][index].lerp_(w_global, latest)

    def _host_buffer(self, like: Tensor) -> Tensor:
        """Return pinned memory for a slice: of one buffer, as large as the largest slice."""
        if like.dtype not in self._host_buffers:
            parts = [part for parts in self.w_global for part in parts if part.dtype == like.dtype]
            largest = max(parts, key=Tensor.numel)
            self._host_buffers[like.dtype] = torch.empty_like(largest, pin_memory=torch.cuda.is_available())
        return self._host_buffers[like.dtype][: like.numel()]


def owned_slices(fragments: int, owner: EvenSlice) -> SlicesOf:
    """Return a function that cuts a flat tensor into fragments, and takes the owner's slice of each."""
    return lambda flat: [owner.of(EvenSlice(p, fragments).of(flat)) for p in range(fragments)]


def is_offloaded(outer: Tensor, weights: Tensor) -> bool:
    """Return whether outer state lies on another device than the weights."""
    return outer.device != weights.device


def _like(part: Tensor, offload: bool) -> Tensor:
    """Allocate a tensor of the same size, on the same device or, with `offload`, in host memory."""
    if offload and part.is_cuda:
        return torch.empty_like(part, device="cpu", pin_memory=True)
    return torch.empty_like(part)
