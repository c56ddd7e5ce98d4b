"""Sizes of the shaper of an emulated link: its token bucket, and the segments that may reach it."""

from __future__ import annotations


def burst_bytes(rate: float) -> int:
    """Return the depth of the token bucket: 1 ms of traffic, at least 8 KiB and at most 512 KiB.

    After every pause the bucket's content passes at once, so a deep bucket makes a slow link look fast for
    short messages (64 KiB are 10 ms at 50 Mbit/s, each way). A shallow one loses rate whenever the timer is
    late.
    """
    return int(min(max(rate / 8 * 0.001, 8 * 1024), 512 * 1024))


def segment_bytes(rate: float) -> int:
    """Return the most that TCP hands to a device at once: less than the bucket holds, and 64 KiB at most.

    The shaper would cut larger ones into packets, which took half of a machine with two cores (docs/log.md).
    """
    return min(7 * burst_bytes(rate) // 10, 1 << 16)
