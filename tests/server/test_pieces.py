"""The number of shards on each host: by the size of the model, and never too many connections."""

from __future__ import annotations

import pytest

from offbeat.server.pieces import LEAST_BYTES, MOST_CONNECTIONS, MOST_PIECES, pieces_for


@pytest.mark.parametrize(
    ("nbytes", "pieces"),
    [(0, 1), (4 * LEAST_BYTES, 1), (8 * LEAST_BYTES - 1, 1), (8 * LEAST_BYTES, 2), (10**12, MOST_PIECES)],
)
def test_no_piece_is_small(nbytes: int, pieces: int) -> None:
    assert pieces_for(nbytes, hosts=4, workers=8, compresses=False) == pieces
    assert pieces_for(nbytes, hosts=4, workers=8, compresses=True) == 1


@pytest.mark.parametrize("workers", [1, 64, 65, 128, 129, 256, 257, 10_000])
def test_a_host_has_no_more_connections_than_it_can_serve(workers: int) -> None:
    pieces = pieces_for(10**12, hosts=1, workers=workers, compresses=False)
    assert pieces == 1 or pieces * workers <= MOST_CONNECTIONS
    assert workers > 64 or pieces == MOST_PIECES
