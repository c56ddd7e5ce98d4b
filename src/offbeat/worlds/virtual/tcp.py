"""TCP's slow start: what a connection that has been idle loses until it sends at the rate of its link.

    window after k round trips      w_k = 2^k · w_0,   w_0 = 10 segments
    slow rounds                     n = the least k with w_k ≥ rate · rtt, or with w_0 + … + w_k ≥ bytes
    seconds lost                    n · rtt − (w_0 + … + w_(n−1)) / rate

In a slow round a sender waits for acknowledgements: it takes a round trip for bytes that the link would carry
in less. Linux begins again with w_0 when a connection has been idle for its retransmission timeout: a round
trip and 0.2 s (`net.ipv4.tcp_slow_start_after_idle`, on by default). Without latency nothing is lost. The
rule is TCP's; that the connections of a ring lose it once, together, is ours. Trees and exchanges of slices,
whose connections carry little each, are not charged.
"""

SEGMENT_BYTES = 1448
FIRST_WINDOW = 10 * SEGMENT_BYTES
LEAST_TIMEOUT_S = 0.2


def slow_start_s(nbytes: float, bytes_per_s: float, rtt_s: float) -> float:
    """Return the seconds that a transfer loses on connections that have been idle."""
    window, sent, lost_s = float(FIRST_WINDOW), 0.0, 0.0
    while window < bytes_per_s * rtt_s and sent + window < nbytes:
        lost_s += rtt_s - window / bytes_per_s
        sent += window
        window *= 2
    return lost_s


def is_idle(since_s: float, now_s: float, rtt_s: float) -> bool:
    """Return whether connections that were last used at `since_s` begin anew."""
    return now_s - since_s >= rtt_s + LEAST_TIMEOUT_S
