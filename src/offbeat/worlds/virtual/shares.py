"""Shares: what an exchange between real ranks leaves in every worker's shares, to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.core.port import Op


def reduce_scatter(brought: list[list[Tensor]], op: Op) -> None:
    """`brought[r]` are worker r's shares. Terms are added in the order of ranks, as over processes."""
    combine = torch.maximum if op is Op.MAX else torch.add
    total = torch.empty(0)
    for rank, shares in enumerate(brought):  # all shares at once: the order is the same for each of them
        term = torch.cat([share.reshape(-1) for share in shares])
        if op is Op.MEAN:
            term.mul_(1 / len(brought))
        total = combine(total, term, out=total) if rank else term
    for rank, part in enumerate(total.split([share.numel() for share in brought[0]])):
        own = brought[rank][rank]
        own.copy_(part.view_as(own))


def all_gather(brought: list[list[Tensor]]) -> None:
    owned = [shares[rank] for rank, shares in enumerate(brought)]
    for shares in brought:
        torch._foreach_copy_(shares, owned)


def all_to_all(brought: list[list[Tensor]]) -> None:
    """What each worker brings is what it sends, then where it receives, by worker."""
    world = len(brought)
    for rank, tensors in enumerate(brought):
        for other, into in enumerate(tensors[world:]):
            if other != rank:
                into.copy_(brought[other][rank])
