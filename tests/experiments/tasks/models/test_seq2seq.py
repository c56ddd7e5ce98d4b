"""The translation model: its size, padding that changes nothing, and greedy words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.models.seq2seq import BEGIN, END, PAD, Seq2Seq
from tests.support.model_size import parameters


def gru_parameters(inputs: int, hidden: int) -> int:
    return 3 * hidden * (inputs + hidden) + 2 * 3 * hidden


def seq2seq_parameters(source: int, target: int, e: int, h: int) -> int:
    dense = (2 * h * h + h) + 2 * h * h + (3 * h * h + h) + (h * target + target)
    return (source + target) * e + 3 * gru_parameters(e, h) + dense


@pytest.fixture
def translator() -> Seq2Seq:
    torch.manual_seed(2)
    model = Seq2Seq(source_words=12, target_words=9, embedding=6, hidden=8, dropout=0.5).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.6)
    nn.init.zeros_(model.source_embedding.weight[PAD])
    return model


def test_padding_changes_nothing(translator: Seq2Seq) -> None:
    """A sentence is read the same whether it stands alone or beside a longer one."""
    source, target = torch.tensor([[5, 7, 4, END]]), torch.tensor([[BEGIN, 4, 5]])
    wide = torch.tensor([[5, 7, 4, END, PAD, PAD], [4, 5, 6, 7, 8, END]])
    beside = translator(wide, target.expand(2, -1))
    torch.testing.assert_close(beside[:1], translator(source, target))
    alone = translator.translate(source, 7)
    together = translator.translate(wide, 7)[:1, : alone.shape[1]]
    assert torch.equal(together, alone)


def test_the_backward_reader_begins_at_the_last_word(translator: Seq2Seq) -> None:
    source = torch.tensor([[5, 7, 4, END, PAD, PAD]])
    states, _ = translator.read(source)
    embedded = translator.source_embedding(source[:, :4])
    expected, _ = translator.backwards(embedded.flip(1))
    torch.testing.assert_close(states[:, :4, 8:], expected.flip(1))


def test_greedy_words_are_the_most_likely_ones(translator: Seq2Seq) -> None:
    """Given what it said, each word it said has the highest score; after the end comes padding."""
    source = torch.tensor([[5, 7, 4, END], [4, 9, 9, END], [6, 11, 10, END]])
    said = translator.translate(source, 8)
    begun = torch.cat((torch.full((3, 1), BEGIN), said[:, :-1]), dim=1)
    likely = translator(source, begun).argmax(dim=2)
    for row, best in zip(said.tolist(), likely.tolist(), strict=True):
        end = row.index(END) + 1 if END in row else len(row)
        assert row[:end] == best[:end] and set(row[end:]) <= {PAD}
    with torch.no_grad():
        translator.output.bias[END] = 1e6
    assert translator.translate(source, 8).tolist() == [[END]] * 3


def test_the_translation_model_has_its_known_size() -> None:
    known = seq2seq_parameters(8000, 6000, 256, 512)
    assert parameters(task("multi30k", model="seq2seq").build()) == known
