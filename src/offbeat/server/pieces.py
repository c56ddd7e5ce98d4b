"""Pieces: the number of shards on each host of a parameter server, in which its pushes travel. [ours]

P is the largest power of two up to 16 with which, for links of `rate` and `hosts`, and |w| the bytes of a
push or of pulled weights, whichever are more:

    |w| / (hosts · P)  ≥  rate · 6 ms        a piece is long enough on the link to hide what it costs
    |w| / (hosts · P)  ≥  32 KiB
    P · workers  ≤  256                      connections to a host
    P · hosts    ≤  64                       connections of a worker

A worker's tensors for the shards of one host leave one after another, and each request for weights right
behind its push. So shard j's weights come down while the update for shard j + 1 goes up. With P = 1 a link
stands idle one way while it is busy the other way; how much that costs falls as 1/P. With s = |w|/rate:

    a server of its own, one worker            s + s/P, instead of 2s
    shards beside the workers, in phase        2 s (N−1)/N, whatever P is: others use the idle direction
    the same, half of them out of phase        times 1 + 2/(3P) in virtual time, instead of 5/3

A piece has a connection and threads of its own, so it is cut only where links are slow. It is 1 where shards
gather the workers' pushes (rounds, barriers): each shard would end its rounds by itself, and nothing would
come down earlier. And it is 1 with a codec that may send more, or err more, if it cuts finer
(`Codec.cuts_anywhere`). A sparse codec does not: it sends the same fraction of each piece as of the whole
slice. But which entries it sends depends on the number of pieces, as it does on that of the hosts.
"""

from __future__ import annotations

MOST_PIECES = 16
LEAST_BYTES = 32 << 10  # of a piece
LEAST_S = 0.006  # that a piece takes on a link
MOST_CONNECTIONS = 256  # of all workers to one host
MOST_OF_WORKER = 64  # connections of one worker to all hosts


def pieces_for(nbytes: float, hosts: int, workers: int, bytes_per_s: float) -> int:
    """Return the number of shards on each host, for messages of so many bytes and the rate of the links."""
    of_host = nbytes / hosts
    most = min(
        MOST_PIECES,
        of_host / LEAST_BYTES,
        of_host / (LEAST_S * bytes_per_s) if bytes_per_s else MOST_PIECES,
        MOST_CONNECTIONS / workers,
        MOST_OF_WORKER / hosts,
    )
    return 1 << (max(1, int(most)).bit_length() - 1)
