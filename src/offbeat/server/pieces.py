"""Pieces: the number of shards on each host of a parameter server, in which its pushes travel. [ours]

One, unless the user asks for another, or for the one that suits the model's size:

    P = min(4, ⌊|w| / (hosts · 128 KiB)⌋, ⌊256 / workers⌋), but at least 1;   with a codec P = 1

A worker's tensors for the shards of one host leave one after another, and each request for weights right
behind its push. So shard j's weights come down while the update for shard j + 1 goes up. With P = 1 a link
stands idle one way while it is busy the other way; how much that costs falls as 1/P. With s = |w|/rate:

    a server of its own, one worker            s + s/P, instead of 2s
    shards beside the workers, in phase        2 s (N−1)/N, whatever P is: others use the idle direction
    the same, half of them out of phase        times 1 + 2/(3P) in virtual time, instead of 5/3

A piece has a connection and threads of its own, so small ones cost more than they gain, and there are at most
256 connections to a host. A codec compresses each shard's slice by itself: a finer cut would change what is
sent, so that with a codec there is one shard for each host.
"""

from __future__ import annotations

MOST_PIECES = 4
LEAST_BYTES = 128 << 10  # of a piece
MOST_CONNECTIONS = 256  # of all workers to one host


def pieces_for(nbytes: int, hosts: int, workers: int, compresses: bool) -> int:
    """Return the number of shards on each host, for weights of so many bytes; `compresses`: with a codec."""
    if compresses:
        return 1
    return max(1, min(MOST_PIECES, nbytes // (hosts * LEAST_BYTES), MOST_CONNECTIONS // workers))
