"""The kernels themselves. A row is a chunk: `8 // BITS` segments of `WIDTH` entries, which share bytes."""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def encode(
    entries,
    scales,
    codes,
    count,
    seed,
    least,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    SEGMENTS: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (column < WIDTH)[None, :]
    start = row.to(tl.int64) * (SEGMENTS * WIDTH)
    top = tl.zeros((ROWS,), tl.float32)
    size = tl.zeros((ROWS,), tl.float32)
    bad = tl.zeros((ROWS,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        x = tl.load(entries + start[:, None] + segment * WIDTH + column[None, :], mask=inside, other=0.0)
        top = tl.maximum(top, tl.max(tl.abs(x), axis=1))
        size += tl.sum(tl.abs(x), axis=1)
        bad += tl.sum(x * 0.0, axis=1)  # not a number, if an entry is not finite
    if BITS == 1:
        scale = top if STOCHASTIC else size / (SEGMENTS * WIDTH)
    else:
        scale = tl.div_rn(top, tl.full((ROWS,), LEVELS, tl.float32))
        scale = tl.where(scale < least, 0.0, scale)
    divisor = tl.where(scale == 0.0, 1.0, scale)[:, None]
    packed = tl.zeros((ROWS, WIDTH), tl.int32)
    for segment in tl.static_range(SEGMENTS):
        place = start[:, None] + segment * WIDTH + column[None, :]
        x = tl.load(entries + place, mask=inside, other=0.0)
        if BITS == 1:
            threshold = (2.0 * tl.rand(seed, place) - 1.0) * top[:, None] if STOCHASTIC else 0.0
            digit = (x >= threshold).to(tl.int32)
        else:
            steps = tl.div_rn(x, divisor + tl.zeros((ROWS, WIDTH), tl.float32))
            steps = tl.floor(steps + tl.rand(seed, place)) if STOCHASTIC else libdevice.rint(steps)
            steps = tl.minimum(tl.maximum(steps, -LEVELS), LEVELS)
            digit = steps.to(tl.int32) if BITS == 8 else steps.to(tl.int32) + LEVELS
        packed |= digit << (BITS * segment)
    tl.store(scales + row, scale + bad, mask=row < count)
    tl.store(codes + row.to(tl.int64)[:, None] * WIDTH + column[None, :], packed.to(tl.uint8), mask=inside)


@triton.jit
def decode(
    codes,
    scales,
    entries,
    count,
    factor,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    SEGMENTS: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (column < WIDTH)[None, :]
    scale = tl.load(scales + row, mask=row < count, other=0.0)[:, None] * factor
    packed = tl.load(codes + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=inside, other=0)
    packed = packed.to(tl.int32)
    for segment in tl.static_range(SEGMENTS):
        place = row.to(tl.int64)[:, None] * (SEGMENTS * WIDTH) + segment * WIDTH + column[None, :]
        if BITS == 8:
            digit = (packed << 24) >> 24  # with its sign
        else:
            digit = (packed >> (BITS * segment)) & (2**BITS - 1)
            digit = 2 * digit - 1 if BITS == 1 else digit - LEVELS
        value = digit.to(tl.float32) * scale
        if ADD:
            value += tl.load(entries + place, mask=inside, other=0.0)
        tl.store(entries + place, value, mask=inside)
