"""Some thousands of malformed inputs at every parser of the server; the benchmark sends a million to each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.parameter_server.fuzz import besiege
from benchmarks.support.malformed import CODEC_TEXTS, Target, fuzz, targets
from benchmarks.support.malformed_texts import text_targets

from offbeat.codecs import CODECS

pytestmark = pytest.mark.processes

FRAMES = {"snapshot": 100, "TLS": 300}  # slow ones
NAMES = ["header", "signed value", "specification", "session", "handshake", "TLS", "snapshot"]
NAMES += ["copy of a shard", *(target.name for target in text_targets())]
NAMES += [f"packet of {text}" for text in CODEC_TEXTS]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", NAMES)
def test_a_parser_accepts_what_is_valid_and_raises_its_own_error_else(name: str, tmp_path: Path) -> None:
    (target,) = [target for target in (*targets(tmp_path), *text_targets()) if target.name == name]
    accepted = fuzz(target, FRAMES.get(name, 1000))
    if name in ("header", "signed value", "specification", "session"):
        assert accepted < 500, "most of it is malformed"


def test_all_codecs_of_servers_are_tried() -> None:
    named = {text.partition("(")[0] for text in CODEC_TEXTS}
    assert named == {name for name, cls in CODECS.items() if cls.splittable} - {"error_feedback"}


def test_an_error_of_another_kind_is_noticed() -> None:
    with pytest.raises(UnicodeDecodeError):
        fuzz(Target("text", [b"abc"], lambda data: bool(data.decode() or True)), 1000)


def test_an_honest_worker_is_not_harmed_by_strangers(tmp_path: Path) -> None:
    read, sent = besiege(tmp_path, frames=3000, steps=30)
    assert sent == 3000
    assert all(torch.equal(weights, torch.full_like(weights, 30.0)) for weights in read)
