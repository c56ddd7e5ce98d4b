"""Untrained tensors of a model besides its buffers: frozen parameters, and buffers that came after attach.

Nothing exchanges them in training: most are the same on all workers, and large (the body under LoRA). But the
loop may change them, such as a teacher that follows the weights (BYOL, DINO, target networks), or masks of
pruning. A published model is one model, so where workers differ in such a tensor, it is

    float: the mean over the workers;   any other, and under the policy `broadcast` of buffers: worker 0's

and each worker has its own back afterwards. Sums of the bits show what differs: no tensor that is the same
on all workers travels.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from offbeat.core.buffers import has_mean, places_of
from offbeat.core.checksum import bits, same_on_all
from offbeat.core.port import Op, Port
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError


def untrained_tensors(replica: Replica) -> dict[str, Tensor]:
    """Return the frozen parameters, and the buffers that are saved and came after attach, by name."""
    known = {id(param) for block in replica.blocks for param in block.params}
    known |= {id(buffer) for buffer in replica.buffers.all()}
    found = {name: param.data for name, param in replica.model.named_parameters() if id(param) not in known}
    found |= {p.name: p.tensor for p in places_of(replica.model) if p.is_saved and id(p.tensor) not in known}
    # A tensor of a class of its own, such as a quantized one, cannot be averaged, nor does it change.
    return {name: tensor for name, tensor in found.items() if type(tensor) is Tensor and tensor.numel()}


async def publish_untrained(replica: Replica, port: Port) -> list[tuple[Tensor, Tensor]]:
    """Return the untrained tensors in which workers differ, each with the value that all publish."""
    found = untrained_tensors(replica)
    if not found or port.world == 1:
        return []
    tensors = list(found.values())
    names = "; ".join(f"{name} {list(t.shape)} {t.dtype}" for name, t in found.items())
    device = tensors[0].device
    sums = torch.stack([bits(tensor).to(device) for tensor in tensors])
    order = torch.arange(1, 2 * len(tensors), 2, device=device)  # so that a change of one hides no other
    model = torch.tensor(zlib.crc32(names.encode()), device=device)
    alike, equal = await same_on_all(torch.stack([model, (sums * order).sum()]), port)
    if not alike:
        raise OffbeatError(
            "the ranks' models have different frozen parameters, or different buffers were registered after "
            f"attach; here: {names[:300]}. Change a model alike on all ranks"
        )
    if equal:
        return []
    same = await same_on_all(sums, port)
    pairs = [
        (tensor, tensor.clone(memory_format=torch.contiguous_format))
        for tensor, equal in zip(tensors, same, strict=True)
        if not equal
    ]
    averages = replica.buffers.policy != "broadcast"
    sent = [
        port.all_reduce(copy, Op.MEAN) if averages and has_mean(copy) else port.broadcast(copy)
        for _, copy in pairs
    ]
    return [(own, await pending) for (own, _), pending in zip(pairs, sent, strict=True)]
