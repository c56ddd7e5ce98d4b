"""Chunked top-k: the k largest entries of each chunk, with indices inside of it, perhaps quantized.

    a chunk of c entries sends k = ratio · c of them, rounded, at least 1; the last chunk may be shorter

A packet holds the values, as they are or as packets of `Quantize`, then the indices: 8 bits each for chunks
of fewer than 256 entries, 16 bits for larger ones. Every chunk sends its k, so no counts are needed; where
fewer than k entries differ from 0, the others are marked by the largest index there is, and decoded as 0:
quantizing would make something of them. All chunks are searched at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from offbeat.codecs.base import Sparse
from offbeat.codecs.quantize import Quantize
from offbeat.core.finite import nan_if_not_finite
from offbeat.errors import OffbeatError

MOST = (1 << 16) - 1  # entries of a chunk, whose indices have 16 bits


def chunked_count(sparse: Sparse, numel: int, chunk: int) -> int:
    """Return how many of `numel` entries are sent."""
    whole, rest = divmod(numel, chunk)
    return whole * sparse.count(chunk) + (sparse.count(rest) if rest else 0)


def chunked_nbytes(
    sparse: Sparse, chunk: int, quantize: Quantize | None, numel: int, dtype: torch.dtype
) -> int:
    """Return the size of a packet."""
    count = chunked_count(sparse, numel, chunk)
    width = _index_dtype(chunk).itemsize
    value_bytes = count * dtype.itemsize if quantize is None else quantize.nbytes(count, dtype)
    return -(-value_bytes // width) * width + count * width  # indices begin at a multiple of their width


def encode_chunks(
    sparse: Sparse, chunk: int, quantize: Quantize | None, tensor: Tensor, packet: Tensor
) -> None:
    """Encode the largest entries of each chunk into `packet`."""
    values, indices = _split(sparse, chunk, packet, tensor)
    chosen = [
        rows.abs().topk(sparse.count(rows.size(1)), dim=1, sorted=False).indices.sort(dim=1).values
        for rows in _rows(tensor, chunk)
    ]
    pairs = zip(_rows(tensor, chunk), chosen, strict=True)
    largest = torch.cat([rows.gather(1, places).view(-1) for rows, places in pairs])
    largest[:1] += nan_if_not_finite(tensor)
    places = torch.cat([places.view(-1) for places in chosen])
    indices.copy_(places.masked_fill_(largest == 0, _nothing(chunk)))
    if quantize is None:
        values.view(tensor.dtype).copy_(largest)
    else:
        quantize.encode(quantize.init(largest), largest, values)


def add_chunks(
    sparse: Sparse, chunk: int, quantize: Quantize | None, packet: Tensor, into: Tensor, factor: float
) -> None:
    """Add the decoded packet, times `factor`, to `into`."""
    coded, indices = _split(sparse, chunk, packet, into)
    if quantize is None:
        values = coded.view(into.dtype)
    else:
        values = into.new_empty(indices.numel())
        quantize.decode(coded, values)
    places = indices.to(torch.int64)
    nothing = places == _nothing(chunk)
    values, places = values.masked_fill(nothing, 0), places.masked_fill_(nothing, 0)
    into.index_add_(0, _in_tensor(sparse, chunk, places, into), values, alpha=factor)


def _in_tensor(sparse: Sparse, chunk: int, places: Tensor, into: Tensor) -> Tensor:
    """Turn places in chunks into places in the whole tensor; on a CPU, refuse what no encoder writes."""
    whole, rest = divmod(into.numel(), chunk)
    starts = torch.arange(0, whole * chunk, chunk, device=into.device).repeat_interleave(sparse.count(chunk))
    if rest:
        starts = torch.cat([starts, starts.new_full((sparse.count(rest),), whole * chunk)])
    beyond = (places >= chunk) | (starts + places >= into.numel())
    if not places.is_cuda and beyond.any():
        raise OffbeatError(f"a packet has an index beyond its chunk of {chunk} entries, or beyond its tensor")
    return starts + places


def _rows(tensor: Tensor, chunk: int) -> Iterator[Tensor]:
    """Yield the whole chunks as rows of a matrix, then the last one if it is shorter."""
    whole = tensor.numel() // chunk * chunk
    if whole:
        yield tensor[:whole].view(-1, chunk)
    if whole < tensor.numel():
        yield tensor[whole:].unsqueeze(0)


def _split(sparse: Sparse, chunk: int, packet: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a packet's values, in bytes, and of its indices."""
    dtype = _index_dtype(chunk)
    index_bytes = chunked_count(sparse, tensor.numel(), chunk) * dtype.itemsize
    values, indices = packet.split([packet.numel() - index_bytes, index_bytes])
    return values, indices.view(dtype)


def _index_dtype(chunk: int) -> torch.dtype:
    return torch.uint8 if chunk < 256 else torch.uint16


def _nothing(chunk: int) -> int:
    """Return the index that stands for no entry."""
    return torch.iinfo(_index_dtype(chunk)).max
