"""Wire format: headers are accepted or refused as the protocol describes."""

from __future__ import annotations

from random import Random

import torch

from offbeat.worlds.processes.server.wire import (
    MOST,
    MOST_CODECS,
    NEW,
    NOW,
    MessageType,
    ProtocolError,
    check_header,
    encode_header,
)
from tests.support.conversations import malformed

FRAMES = 100_000


def test_headers_are_taken_or_refused_as_described() -> None:
    random = Random(0)
    refused = 0
    for _ in range(FRAMES):
        numbers = malformed(random)
        try:
            check_header(torch.tensor(numbers, dtype=torch.int64))
        except ProtocolError:
            refused += 1
    assert refused == FRAMES
    well_formed = [
        (MessageType.LOAD,),
        (MessageType.LEAVE,),
        (MessageType.PUSH, 1, 0),
        (MessageType.PUSH, MOST, MOST, MOST_CODECS),
    ]
    well_formed += [(MessageType.PULL, NOW)]
    well_formed += [
        (MessageType.PULL, MOST),
        (MessageType.JOIN, 0, NEW),
        (MessageType.JOIN, 10**9, MOST, MOST),
    ]
    for kind, *numbers in well_formed:
        assert check_header(encode_header(MessageType(kind), *numbers)) == (
            kind,
            *numbers,
            *[0] * (3 - len(numbers)),
        )
