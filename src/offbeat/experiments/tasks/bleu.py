"""BLEU (Papineni et al., 2002), of a corpus with one reference per sentence.

    BLEU = 100 · exp(min(0, 1 − r/c)) · (p₁ p₂ p₃ p₄)^¼

c and r are the words of all translations and of all references. p_n is the fraction of the translations'
n-grams that are in the sentence's reference, each at most as often as there. Nothing is smoothed: without a
single 4-gram in common, BLEU is 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

LONGEST = 4

Sentence = Sequence[str]


def bleu(translations: Sequence[Sentence], references: Sequence[Sentence]) -> float:
    """Compute BLEU, from 0 to 100."""
    hits, total = [0] * LONGEST, [0] * LONGEST
    for translation, reference in zip(translations, references, strict=True):
        for n in range(1, LONGEST + 1):
            counts = ngrams(translation, n)
            hits[n - 1] += (counts & ngrams(reference, n)).total()
            total[n - 1] += counts.total()
    if not all(hits):
        return 0.0
    translated, expected = (sum(map(len, side)) for side in (translations, references))
    precisions = sum(math.log(hit / of) for hit, of in zip(hits, total, strict=True))
    return 100 * math.exp(min(0.0, 1 - expected / translated) + precisions / LONGEST)


def ngrams(sentence: Sentence, n: int) -> Counter[tuple[str, ...]]:
    """Count the n-grams of a sentence."""
    return Counter(zip(*(sentence[start:] for start in range(n)), strict=False))
