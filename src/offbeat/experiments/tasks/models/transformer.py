"""A causal pre-norm Transformer that predicts the next token, with its output tied to the embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """A layer: x + attention(norm(x)), then x + dense(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x))
        # (3, batch, heads, length, width of a head)
        q, k, v = parts.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x.add(self.dropout(self.attended(seen.transpose(1, 2).reshape(batch, length, width))))
        return x.add(self.dropout(self.dense(x)))


class Transformer(nn.Module):
    """A model from tokens (batch, length) to scores (batch, length, tokens). Positions are learnt."""

    def __init__(
        self,
        *,
        tokens: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        hidden: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(Layer(width, heads, hidden, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        return functional.linear(self.norm(self.layers(x)), self.embedding.weight)
