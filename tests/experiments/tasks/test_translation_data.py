"""Translation: BLEU by hand, sentences in rows, batches by length, and real sentences learnt."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.batching import batches, by_length, shuffled
from offbeat.data.samplers import DefDP, SelDP
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.models.seq2seq import PAD
from offbeat.experiments.tasks.translation_data import Rows, SentencePairs
from offbeat.strategies.bsp import BSP
from tests.support.small_data import write_small

# --- rows of numbers


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=9), st.data())
@settings(deadline=None)
def test_rows_hold_the_sentences(sentences: list[list[int]], data: st.DataObject) -> None:
    rows = Rows.of(sentences)
    chosen = data.draw(st.lists(st.integers(0, len(sentences) - 1), min_size=1))
    taken = rows.take(torch.tensor(chosen)).tolist()
    assert [[number for number in row if number != PAD] for row in taken] == [sentences[i] for i in chosen]
    assert {len(row) for row in taken} == {max(len(sentences[i]) for i in chosen)}


def test_data_moves_to_the_device_and_lengths_stay(tmp_path: Path) -> None:
    write_small(tmp_path)
    data = task("multi30k").load(tmp_path).to("meta")
    assert isinstance(data, SentencePairs) and len(data) == 48
    assert {part.device.type for part in data.batch(torch.arange(3))} == {"meta"}
    assert data.lengths.device.type == "cpu"


# --- batches by length


@given(samples=st.integers(4, 90), workers=st.integers(1, 4), size=st.integers(1, 9), seed=st.integers(0, 5))
@settings(deadline=None)
def test_runs_are_sorted_parts_of_the_same_samples(samples: int, workers: int, size: int, seed: int) -> None:
    lengths = torch.arange(samples).mul(7).remainder(5)
    order = shuffled(samples, seed, 0)
    together = min(workers * size, samples)
    runs = by_length(order, lengths, together, seed, 0)
    assert sorted(runs.tolist()) == list(range(samples))
    full = samples // together * together
    assert sorted(runs[:full].tolist()) == sorted(order[:full].tolist()), "what is left out is left to chance"
    spans = sorted((int(lengths[r].min()), int(lengths[r].max())) for r in runs[:full].split(together))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_workers_share_a_step_of_similar_lengths_and_no_sample() -> None:
    lengths = torch.randint(1, 40, (400,), generator=torch.Generator().manual_seed(0))
    ranks = [batches(400, rank, 4, 5, seed=3, lengths=lengths) for rank in range(4)]
    seen: list[int] = []
    widest = 0
    for _ in range(20):
        step = torch.cat([next(rank) for rank in ranks])
        seen += step.tolist()
        widest = max(widest, int(lengths[step].max() - lengths[step].min()))
    assert sorted(seen) == list(range(400)), "an epoch is all of the data"
    assert widest <= 6, "of 39; 20 of 400 samples in order span about 2"
    mean = lengths[torch.tensor(seen)].float().reshape(20, 20).mean(dim=1).tolist()
    assert mean not in (sorted(mean), sorted(mean, reverse=True)), "short and long ones take turns"
    again = torch.cat([next(rank) for rank in ranks])
    assert again.tolist() != seen[:20]


def test_without_lengths_the_order_is_as_it_was() -> None:
    drawn = batches(23, 1, 2, 3, seed=5)
    order = shuffled(23, 5, 0)[1:22:2]
    assert [next(drawn).tolist() for _ in range(3)] == [order[i : i + 3].tolist() for i in (0, 3, 6)]


@pytest.mark.parametrize("sampler", [SelDP, DefDP])
def test_samplers_batch_by_length_too(sampler: type[SelDP] | type[DefDP]) -> None:
    lengths = torch.arange(60).mul(7).remainder(10)
    drawn = sampler(60, 0, 2, 1).batches(5, lengths)
    first = torch.stack([next(drawn) for _ in range(6)])
    assert sorted(first.flatten().tolist()) == sorted(sampler(60, 0, 2, 1).at(0).tolist())
    assert int((lengths[first].max(dim=1).values - lengths[first].min(dim=1).values).max()) <= 3


def test_samples_of_differing_lengths_are_not_lent(tmp_path: Path) -> None:
    write_small(tmp_path)
    chosen = task("multi30k")
    job = Job(task=chosen, strategy=BSP(), workers=2, inject=(0.5, 0.5))
    with pytest.raises(SettingError, match="multi30k has samples of different lengths"):
        job.batches(chosen.load(tmp_path), 0, 4)
