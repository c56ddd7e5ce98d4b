"""Random conversations of a worker with a shard: well-formed ones, malformed ones, and ones cut short."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import torch

from offbeat.worlds.processes.server.wire import (
    HEADER,
    MOST,
    MOST_CODECS,
    NEW,
    NOW,
    MessageType,
    encode_header,
)

SIZES = [("float32", 60), ("float64", 20)]
Numbers = list[int]


def is_well_formed(numbers: Numbers) -> bool:
    """By the protocol's description, not by the code that is tested."""
    kind, first, second, third, fourth = numbers
    if fourth:  # none of a worker's messages has one
        return False
    match kind:
        case MessageType.JOIN:  # a worker, its clock or none, how many of its pushes were acknowledged
            return 0 <= first <= 10**9 and -1 <= second <= 1 << 53 and 0 <= third <= 1 << 53
        case MessageType.REJOIN:  # the same, with a clock
            return 0 <= first <= 10**9 and 0 <= second <= 1 << 53 and 0 <= third <= 1 << 53
        case MessageType.PUSH:  # a clock, nanoseconds, a form
            return 1 <= first <= 1 << 53 and 0 <= second <= 1 << 53 and 0 <= third <= MOST_CODECS
        case MessageType.PULL:  # a clock or none
            return -1 <= first <= 1 << 53 and second == third == 0
        case MessageType.SAVE:  # a part of the optimizer's state
            return 1 <= first <= 8 and second == third == 0
        case MessageType.LOAD:  # a part
            return 0 <= first <= 8 and 0 <= second <= 1 and third == 0
        case MessageType.REDUCE:  # a number, elements, one of four dtypes times three operations
            return 1 <= first <= 1 << 53 and 0 <= second <= 1 << 53 and 0 <= third <= 11
        case MessageType.LEAVE:
            return first == second == third == 0
    return False


ODD = [-(1 << 63), -(1 << 40), -3, -2, -1, 0, 1, 2, 3, 9, MOST, MOST + 1, 1 << 60, (1 << 63) - 1]


def malformed(random: Random) -> Numbers:
    """A header that is of this protocol almost, or not at all."""
    while True:
        style = random.randrange(3)
        numbers = [random.choice(ODD) for _ in range(HEADER)]
        if style == 0:
            numbers = [random.getrandbits(64) - (1 << 63) for _ in range(HEADER)]
        elif style == 1:  # one number is wrong
            numbers = [random.choice([1, 3, 4, 6, 8, 11]), 1, 0, 0, 0]
            numbers[random.randrange(HEADER)] = random.choice(ODD)
        if not is_well_formed(numbers):
            return numbers


def payload(random: Random, bad: bool = False) -> list[Any]:
    """One value for each tensor."""
    values = [random.choice([0.0, 1.0, -2.0, 1e30]) for _ in SIZES]
    if bad:
        values[random.randrange(len(values))] = random.choice([math.nan, math.inf, -math.inf])
    return [*values]


def conversation(random: Random) -> tuple[list[Any], bool]:
    """What a worker says, and whether the shard must find it malformed; else the link breaks off."""
    said: list[Any] = []
    if random.random() < 0.1:
        said.append(torch.tensor(malformed(random)))
        return said, True
    if random.random() < 0.1:
        kind = random.choice([MessageType.LOAD, MessageType.PUSH, MessageType.PULL, MessageType.LEAVE])
        return [
            encode_header(kind, *[1] * (kind in (MessageType.PUSH, MessageType.PULL))),
            *payload(random),
        ], True
    clock, worker = random.choice([0, 3]), random.randrange(1, 5)
    said.append(encode_header(MessageType.JOIN, worker, clock))
    for _ in range(random.randrange(3)):
        kind = random.choice([MessageType.PUSH, MessageType.PUSH, MessageType.PULL, MessageType.LOAD])
        if kind is MessageType.PUSH:
            clock += 1
            said += [
                encode_header(kind, clock, random.choice([0, MOST])),
                *payload(random, random.random() < 0.3),
            ]
        elif kind is MessageType.PULL:
            said.append(encode_header(kind, random.choice([NOW, clock, MOST])))
        elif random.random() < 0.1:
            said += [encode_header(kind), *payload(random)]
            clock = 0
    end = random.randrange(12)
    if end == 0:
        return said, False
    if end == 1:
        return [*said, encode_header(MessageType.PUSH, clock + 1), *payload(random)[:1]], False
    if end == 2:
        return [*said, encode_header(MessageType.JOIN, worker, random.choice([NEW, 5]))], True
    if end == 3:
        return [*said, encode_header(MessageType.LOAD), *payload(random, bad=True)], True
    if end == 4:
        said += [encode_header(MessageType.PUSH, clock + 1), *payload(random)]
        return [*said, encode_header(MessageType.PUSH, clock + 1000), *payload(random)], True
    return [*said, torch.tensor(malformed(random))], True
