"""Triton kernels behind `ops.py`.

For quantizing, a row is a chunk: `8 // BITS` segments of `WIDTH` entries, which share bytes. A program holds
`ROWS` rows at once, so that memory is read once. The last chunk may be `SHORT`, and is then handled alone:
`length` entries in segments of `width` entries, and `WIDTH` is the next power of two.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def tile(
    row, segment, column, count, width, length, WIDTH: tl.constexpr, ROW: tl.constexpr, SHORT: tl.constexpr
):
    """Return the positions of entries, and whether each is inside the tensor."""
    if SHORT:
        place = row.to(tl.int64) + segment * width + column
        inside = (row < count) & (column < width) & (place < length)
    else:
        place = row.to(tl.int64) * ROW + segment * WIDTH + column
        inside = row < count
    return place, inside


@triton.jit
def noise(seed, place):
    """Draw a number from 0 to 1 for each position, by a hash: 3x faster than Triton's generator."""
    bits = (place + seed * 40503).to(tl.int32) * 0x1E3779B1
    bits = (bits ^ (bits >> 15)) * 0x2C1B3C6D
    bits = (bits ^ (bits >> 13)) * 0x297A2D39
    return ((bits ^ (bits >> 16)) & 0x7FFFFFFF).to(tl.float32) * (1.0 / 2147483648.0)


@triton.jit
def nearest(steps):
    """Round to the nearest whole number, ties to even; for numbers below 2²²."""
    return (steps + 12582912.0) - 12582912.0


@triton.jit
def encode(
    entries,
    scales,
    codes,
    count,
    width,
    length,
    seed,
    least,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Quantize ROWS rows: their scales and their codes."""
    SEGMENTS: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    segment, column = tl.arange(0, SEGMENTS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    place, inside = tile(
        row[:, None, None], segment, column, count, width, length, WIDTH, SEGMENTS * WIDTH, SHORT
    )
    x = tl.load(entries + place, mask=inside, other=0.0)
    size = tl.abs(x)
    # over the segments first: those are in one thread
    top = tl.max(tl.max(size, axis=1), axis=1)
    bad = tl.sum(tl.sum(x * 0.0, axis=1), axis=1)  # not a number, if an entry is not finite
    if BITS == 1:
        mean = tl.sum(tl.sum(size, axis=1), axis=1) / length
        scale = top if STOCHASTIC else mean
        threshold = (2.0 * noise(seed, place) - 1.0) * top[:, None, None] if STOCHASTIC else 0.0
        digit = (x >= threshold).to(tl.int32)
    else:
        scale = tl.div_rn(top, tl.full((ROWS,), LEVELS, tl.float32))
        scale = tl.where(scale < least, 0.0, scale)
        divisor = tl.where(scale == 0.0, 1.0, scale)[:, None, None]
        steps = tl.div_rn(x, divisor + tl.zeros((ROWS, SEGMENTS, WIDTH), tl.float32))
        steps = tl.floor(steps + noise(seed, place)) if STOCHASTIC else nearest(steps)
        steps = tl.minimum(tl.maximum(steps, -LEVELS), LEVELS)
        digit = steps.to(tl.int32) if BITS == 8 else steps.to(tl.int32) + LEVELS
    packed = tl.sum(tl.where(inside, digit, 0) << (BITS * segment), axis=1).to(tl.uint8)
    tl.store(scales + row, scale + bad, mask=row < count)
    byte = tl.arange(0, WIDTH)[None, :]
    to = row.to(tl.int64)[:, None] * WIDTH + byte
    tl.store(codes + to, packed, mask=(row < count)[:, None] & (byte < width))


@triton.jit
def decode(
    codes,
    scales,
    entries,
    count,
    width,
    length,
    factor,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
    ADD: tl.constexpr,
):
    """Decode ROWS rows of codes, and write the values or add them."""
    SEGMENTS: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    segment = tl.arange(0, SEGMENTS * WIDTH)[None, :] // WIDTH
    column = tl.arange(0, SEGMENTS * WIDTH)[None, :] % WIDTH
    place, inside = tile(row[:, None], segment, column, count, width, length, WIDTH, SEGMENTS * WIDTH, SHORT)
    scale = tl.load(scales + row, mask=row < count, other=0.0)[:, None] * factor
    packed = tl.load(codes + row.to(tl.int64)[:, None] * WIDTH + column, mask=inside, other=0).to(tl.int32)
    if BITS == 8:
        digit = (packed << 24) >> 24  # with its sign
    else:
        digit = (packed >> (BITS * segment)) & (2**BITS - 1)
        digit = 2 * digit - 1 if BITS == 1 else digit - LEVELS
    value = digit.to(tl.float32) * scale
    if ADD:
        value += tl.load(entries + place, mask=inside, other=0.0)
    tl.store(entries + place, value, mask=inside)


@triton.jit
def cast_to_half(entries, packet, numel, largest, BLOCK: tl.constexpr):
    """Convert to float16 within ±largest; infinities and NaNs stay."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(entries + place, mask=place < numel, other=0.0)
    bounded = tl.minimum(tl.maximum(x, -largest), largest)
    finite = tl.abs(x) < float("inf")
    tl.store(packet + place, tl.where(finite, bounded, x).to(tl.float16), mask=place < numel)


@triton.jit
def drawn(seed, number, numel, count):
    """Draw an index out of slice `number`, as `randomk.draw` does; return it and the slice's width."""
    start = number * numel // count
    width = (number + 1) * numel // count - start
    bits = number + seed * 0x9E3779B97F4A7C1
    bits = (bits ^ (bits >> 29)) * 0x3F58476D1CE4E5B9
    bits = (bits ^ (bits >> 29)) * 0x14D049BB133111EB
    return start + ((bits ^ (bits >> 32)) & 0x7FFFFFFF) % width, width


@triton.jit
def gather_drawn(entries, seed, values, numel, count, UNBIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one drawn entry of each of `count` slices."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index, width = drawn(tl.load(seed), number, numel, count)
    value = tl.load(entries + index, mask=number < count, other=0.0)
    if UNBIASED:
        value *= width.to(tl.float32)
    tl.store(values + number, value, mask=number < count)


@triton.jit
def add_drawn(entries, seed, values, numel, count, factor, BLOCK: tl.constexpr):
    """Add values to the drawn entries."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index, _ = drawn(tl.load(seed), number, numel, count)
    value = tl.load(values + number, mask=number < count, other=0.0) * factor
    value += tl.load(entries + index, mask=number < count, other=0.0)
    tl.store(entries + index, value, mask=number < count)


@triton.jit
def add_paged(entries, values, indices, ends, numel, count, factor, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Add one page's values per program; `ends` tells where the values of each page end."""
    page = tl.program_id(0)
    first = tl.load(ends + page - 1, mask=page > 0, other=0)
    last = tl.minimum(tl.load(ends + page), count)
    for low in range(first, last, BLOCK):
        place = low + tl.arange(0, BLOCK)
        inside = place < last
        index = tl.load(indices + place, mask=inside, other=0).to(tl.int64) + page.to(tl.int64) * PAGE
        value = tl.load(values + place, mask=inside, other=0.0) * factor
        # a packet may be filled up with zeros for an entry that it has already
        tl.atomic_add(entries + index, value, mask=inside & (index < numel), sem="relaxed")


@triton.jit
def add_and_check(entries, addend, not_finite, numel, BLOCK: tl.constexpr):
    """Add, and set `not_finite` to 1 if any sum is not finite."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(entries + place, mask=place < numel, other=0.0)
    x += tl.load(addend + place, mask=place < numel, other=0.0)
    tl.store(entries + place, x, mask=place < numel)
    finite = (tl.abs(x) < float("inf")).to(tl.int32)
    tl.store(not_finite, 1.0, mask=tl.min(finite) == 0)


@triton.jit
def copy_if_finite(entries, into, not_finite, numel, BLOCK: tl.constexpr):
    """Copy the finite entries, unless `not_finite` is set."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    copied = place < tl.where(tl.load(not_finite) == 0.0, numel, 0)
    x = tl.load(entries + place, mask=copied, other=0.0)
    tl.store(into + place, x, mask=copied & (tl.abs(x) < float("inf")))
