"""The number of shards on each host: by the model and the links, and never too many connections."""

from __future__ import annotations

import math

import pytest

from offbeat import ASP, DSSP, GSSP, OSP, SSDSGD, SSP, DiLoCo, Oscars
from offbeat.codecs import BFloat16, Half, Quantize, RandomK, TopK
from offbeat.server.pieces import (
    LEAST_BYTES,
    LEAST_S,
    MOST_CONNECTIONS,
    MOST_OF_WORKER,
    MOST_PIECES,
    pieces_for,
)
from offbeat.strategies.gssp import GDTopK
from tests.support.virtual_runs import AnyStrategy

MBIT = 1e6 / 8


@pytest.mark.parametrize(
    ("nbytes", "pieces"),
    [
        (0, 1),
        (4 * LEAST_BYTES, 1),
        (8 * LEAST_BYTES - 1, 1),
        (8 * LEAST_BYTES, 2),
        (16 * LEAST_BYTES - 1, 2),
        (10**12, MOST_PIECES),
    ],
)
def test_no_piece_is_small(nbytes: int, pieces: int) -> None:
    assert pieces_for(nbytes, hosts=4, workers=8, bytes_per_s=0.0) == pieces


@pytest.mark.parametrize(
    ("rate", "pieces"), [(1000 * MBIT, 1), (200 * MBIT, 4), (50 * MBIT, 16), (MBIT, 16), (math.inf, 1)]
)
def test_no_piece_is_short_on_its_link(rate: float, pieces: int) -> None:
    assert pieces_for(2_678_824, hosts=4, workers=4, bytes_per_s=rate) == pieces
    of_piece_s = 2_678_824 / 4 / pieces / rate
    assert pieces == 1 or of_piece_s >= LEAST_S
    assert pieces == MOST_PIECES or of_piece_s < 2 * LEAST_S


@pytest.mark.parametrize("workers", [1, 16, 17, 64, 65, 128, 129, 256, 257, 10_000])
def test_a_host_has_no_more_connections_than_it_can_serve(workers: int) -> None:
    pieces = pieces_for(10**12, hosts=1, workers=workers, bytes_per_s=0.0)
    assert pieces == 1 or pieces * workers <= MOST_CONNECTIONS
    assert workers > 16 or pieces == MOST_PIECES


@pytest.mark.parametrize("hosts", [1, 4, 5, 16, 64, 65, 1000])
def test_a_worker_has_no_more_connections_than_it_can_serve(hosts: int) -> None:
    pieces = pieces_for(10**12, hosts=hosts, workers=1, bytes_per_s=0.0)
    assert pieces == 1 or pieces * hosts <= MOST_OF_WORKER
    assert hosts > 4 or pieces == MOST_PIECES


@pytest.mark.parametrize(
    ("strategy", "cut"),
    [
        (ASP(), True),
        (SSP(), True),
        (SSP(push="gradient"), True),
        (DSSP(), True),
        (GSSP(), True),
        (SSP(codec=Half()), True),
        (ASP(codec=BFloat16()), True),
        (ASP(codec=TopK(0.01)), True),
        (SSP(codec=RandomK(0.01)), True),
        (GSSP(sparse=GDTopK()), True),
        (ASP(codec=Quantize(8)), False),
        (SSP(staleness=0, push="gradient"), False),
        (SSDSGD(rule="authors", on="server"), False),
        (OSP(on="server"), False),
        (Oscars(), False),
        (DiLoCo(on="server"), False),
    ],
    ids=str,
)
def test_what_is_pushed_and_applied_at_once_may_be_cut(strategy: AnyStrategy, cut: bool) -> None:
    half = strategy.server_half()
    assert half is not None
    assert half.cuts_anywhere == cut


@pytest.mark.parametrize(
    ("strategy", "ratio"),
    [
        (ASP(), 1),
        (ASP(codec=TopK(0.01)), 1),
        (SSP(codec=Half()), 1),
        (GSSP(sparse=GDTopK(answers="full")), 1),
        (GSSP(sparse=GDTopK()), 6 / 4 * 0.35),
        (GSSP(sparse=GDTopK(ratio=0.01)), 0.5),
    ],
    ids=str,
)
def test_what_travels_is_the_larger_of_a_push_and_pulled_weights(strategy: AnyStrategy, ratio: float) -> None:
    half = strategy.server_half()
    assert half is not None
    assert half.wire_ratio == pytest.approx(ratio, rel=1e-3)
