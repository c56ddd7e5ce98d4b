"""The Transformer: its size, and that no token is predicted from later ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.models.transformer import Transformer
from tests.support.model_size import parameters


def transformer_parameters(tokens: int, context: int, layers: int, width: int, hidden: int) -> int:
    attention = width * 3 * width + 3 * width + width * width + width
    dense = width * hidden + hidden + hidden * width + width
    return (tokens + context) * width + layers * (attention + dense + 4 * width) + 2 * width


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


@pytest.mark.parametrize(
    ("name", "model", "known"),
    [
        ("wikitext2", "transformer", transformer_parameters(33_278, 35, 2, 200, 200)),
        ("shakespeare", "gpt", transformer_parameters(65, 128, 4, 128, 512)),
    ],
)
def test_transformers_have_their_known_size(name: str, model: str, known: int) -> None:
    assert parameters(task(name, model=model).build()) == known
