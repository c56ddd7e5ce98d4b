"""Small data sets in the published formats, made of nothing, for tests of what does not need real ones."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from offbeat.experiments.tasks.cifar import PIXELS, Cifar10
from offbeat.experiments.tasks.multi30k import Multi30k
from offbeat.experiments.tasks.shakespeare import Shakespeare
from offbeat.experiments.tasks.wikitext import WikiText2

TASKS = ("cifar10", "multi30k", "wikitext2", "shakespeare")


def write_small(folder: Path) -> None:
    """All of them below a folder; some files are packed."""
    draw = random.Random(0)
    cifar, multi30k = (folder / kind.manifest.folder for kind in (Cifar10, Multi30k))
    wikitext, shakespeare = (folder / kind.manifest.folder for kind in (WikiText2, Shakespeare))
    for place in (cifar, multi30k, wikitext, shakespeare):
        place.mkdir(parents=True)
    for name in Cifar10.manifest.names:
        records = (bytes([draw.randrange(10)]) + draw.randbytes(PIXELS) for _ in range(8))
        (cifar / name).write_bytes(b"".join(records))
    for split, pairs in {"train": 48, "test_2016_flickr": 6}.items():
        lines = [" ".join(draw.choices("abcdefghij", k=draw.randint(1, 9))) for _ in range(pairs)]
        (multi30k / f"{split}.de").write_text("\n".join(lines) + "\n")
        (multi30k / f"{split}.en").write_text("\n".join(line[::-1].upper() for line in lines) + "\n")
    for name, words in {"wiki.train.tokens": 900, "wiki.test.tokens": 100}.items():
        text = " ".join(draw.choices(["the", "a", "<unk>", "of", "= x =", "\n"], k=words))
        (wikitext / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    (shakespeare / "input.txt").write_text("".join(draw.choices("abc de\n", k=3000)))
