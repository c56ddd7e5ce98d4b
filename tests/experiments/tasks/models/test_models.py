"""The papers' models have the sizes they are known for, and do what their descriptions say."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.models.resnet import ResidualBlock
from offbeat.experiments.tasks.models.seq2seq import BEGIN, END, PAD, Seq2Seq
from offbeat.experiments.tasks.models.transformer import Transformer
from offbeat.experiments.tasks.models.vgg import STAGES_11, STAGES_19


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def vgg_parameters(stages: tuple[tuple[int, ...], ...]) -> int:
    """A convolution has 9·in·out weights and out biases, a norm 2·out, the dense layer 512·10 and 10."""
    widths = [3, *(width for stage in stages for width in stage)]
    return sum(9 * i * o + 3 * o for i, o in pairwise(widths)) + 512 * 10 + 10


def transformer_parameters(tokens: int, context: int, layers: int, width: int, hidden: int) -> int:
    attention = width * 3 * width + 3 * width + width * width + width
    dense = width * hidden + hidden + hidden * width + width
    return (tokens + context) * width + layers * (attention + dense + 4 * width) + 2 * width


def gru_parameters(inputs: int, hidden: int) -> int:
    return 3 * hidden * (inputs + hidden) + 2 * 3 * hidden


def seq2seq_parameters(source: int, target: int, e: int, h: int) -> int:
    dense = (2 * h * h + h) + 2 * h * h + (3 * h * h + h) + (h * target + target)
    return (source + target) * e + 3 * gru_parameters(e, h) + dense


@pytest.mark.parametrize(
    ("name", "model", "known"),
    [
        ("mnist", "lenet5", 61_706),
        ("cifar10", "resnet18", 11_173_962),
        ("cifar10", "vgg11", vgg_parameters(STAGES_11)),
        ("cifar10", "vgg11", 9_231_114),
        ("cifar10", "vgg19", vgg_parameters(STAGES_19)),
        ("cifar10", "vgg19", 20_040_522),
        ("multi30k", "seq2seq", seq2seq_parameters(8000, 6000, 256, 512)),
        ("wikitext2", "transformer", transformer_parameters(33_278, 35, 2, 200, 200)),
        ("shakespeare", "gpt", transformer_parameters(65, 128, 4, 128, 512)),
    ],
)
def test_models_have_their_known_size(name: str, model: str, known: int) -> None:
    assert parameters(task(name, model=model).build()) == known


def test_vgg_has_as_many_layers_as_its_name_says() -> None:
    for stages, layers in ((STAGES_11, 11), (STAGES_19, 19)):
        assert sum(map(len, stages)) + 3 == layers, "and three dense ones, of which 32 × 32 needs one"


@pytest.mark.parametrize("model", ["resnet18", "vgg11", "vgg19"])
def test_image_models_score_ten_classes(model: str) -> None:
    net = task("cifar10", model=model).build().eval()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_resnet_halves_the_image_three_times_and_has_eight_blocks() -> None:
    net = task("cifar10").build()
    assert sum(isinstance(module, ResidualBlock) for module in net.modules()) == 8
    assert net[:-3].eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


# --- the Transformer


@pytest.fixture
def small() -> Transformer:
    torch.manual_seed(1)
    model = Transformer(tokens=20, context=12, layers=2, heads=2, width=16, hidden=24)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)  # large, so that what should matter does
    return model


def test_no_token_is_predicted_from_later_ones(small: Transformer) -> None:
    tokens = torch.randint(20, (3, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 20
    scores, others = small(tokens), small(changed)
    torch.testing.assert_close(scores[:, :7], others[:, :7])
    assert not torch.isclose(scores[:, 7:], others[:, 7:]).all(dim=2).any()


def test_a_token_is_predicted_from_all_before_it(small: Transformer) -> None:
    tokens = torch.randint(20, (1, 12))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 20
    assert not torch.isclose(small(tokens), small(changed)).all(dim=2).any()


# --- Seq2Seq


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
