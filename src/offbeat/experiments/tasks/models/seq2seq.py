"""Seq2Seq with attention: two GRUs read the source in both directions, a third writes the translation.

    h_j = [forward_j ; backward_j]            s_0 = tanh(W [forward_last ; backward_first])
    a_tj ∝ exp(s_t · A h_j)                    c_t = Σ_j a_tj h_j
    p_t = softmax(V tanh(C [s_t ; c_t]))

Attention is Luong et al.'s (2015, "general"): the writer's states do not depend on it, so in training all
steps of the writer are one call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PAD, UNK, BEGIN, END = range(4)


class Seq2Seq(nn.Module):
    """A translation model from source words to target words."""

    def __init__(
        self, *, source_words: int, target_words: int, embedding: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(source_words, embedding, padding_idx=PAD)
        self.target_embedding = nn.Embedding(target_words, embedding, padding_idx=PAD)
        self.forwards = nn.GRU(embedding, hidden, batch_first=True)
        self.backwards = nn.GRU(embedding, hidden, batch_first=True)
        self.bridge = nn.Linear(2 * hidden, hidden)
        self.writer = nn.GRU(embedding, hidden, batch_first=True)
        self.attention = nn.Linear(2 * hidden, hidden, bias=False)
        self.combine = nn.Linear(3 * hidden, hidden)
        self.output = nn.Linear(hidden, target_words)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Compute the scores of the word after each word of the target: (batch, length, words)."""
        states, state = self.read(source)
        return self.write(target, state, states, source == PAD)[0]

    def read(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source's states (batch, length, 2 · hidden) and the writer's (1, batch, hidden)."""
        embedded = self.dropout(self.source_embedding(source))
        # The backward reader must begin at a sentence's last word, not at the padding after it.
        places = torch.arange(source.shape[1], device=source.device).expand_as(source)
        last = (source != PAD).sum(dim=1, keepdim=True) - 1
        mirror = torch.where(places <= last, last - places, places)
        ahead, _ = self.forwards(embedded)
        back, _ = self.backwards(rows(embedded, mirror))
        ends = torch.cat((rows(ahead, last), rows(back, last)), dim=2)
        return torch.cat((ahead, rows(back, mirror)), dim=2), self.bridge(ends).tanh().transpose(0, 1)

    def write(self, target: Tensor, state: Tensor, states: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the next words, and the writer's state after the last one."""
        written, state = self.writer(self.dropout(self.target_embedding(target)), state)
        match = written @ self.attention(states).transpose(1, 2)  # (batch, target, source)
        weights = match.masked_fill(padding[:, None, :], float("-inf")).softmax(dim=2)
        combined = self.combine(torch.cat((written, weights @ states), dim=2)).tanh()
        return self.output(self.dropout(combined)), state

    def translate(self, source: Tensor, longest: int) -> Tensor:
        """Translate greedily: take the most likely word at each step. Rows end with END, then PAD."""
        states, state = self.read(source)
        padding = source == PAD
        word = torch.full_like(source[:, :1], BEGIN)
        ended = torch.zeros_like(word, dtype=torch.bool)
        words = []
        for _ in range(longest):
            scores, state = self.write(word, state, states, padding)
            word = scores.argmax(dim=2).masked_fill(ended, PAD)
            words.append(word)
            ended = ended | (word == END)
            if bool(ended.all()):
                break
        return torch.cat(words, dim=1)


def rows(states: Tensor, places: Tensor) -> Tensor:
    """Return the states of each sample at these places."""
    return states.gather(1, places[:, :, None].expand(-1, -1, states.shape[2]))
