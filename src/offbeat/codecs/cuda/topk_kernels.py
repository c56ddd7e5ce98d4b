"""Triton kernels behind `topk.py`.

Magnitudes are compared as whole numbers, by the bits of a float without its sign: their order is the same,
and a NaN is the largest of all. A sample gives a threshold that slightly more than `count` entries pass. One
pass over memory marks those, and they are collected in order. The magnitude of rank `count` among them is
found digit by digit, eight bits at a time, by counting how many have each digit. The entries above it, with
as many of its equals as are still needed, go into the packet, page by page.

Where too few entries passed, or more than fit, the kernels search all entries instead of those
collected, with 0 as the threshold. `candidates` tells which case it is.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
COARSE = tl.constexpr(15)  # lowest bits that a threshold leaves out: it is exact to 1 part in 256
DIGITS = tl.constexpr(256)


@triton.jit
def estimate_threshold(entries, bounds, stride, sampled, rank, SAMPLE: tl.constexpr):
    """Find, bit by bit, a magnitude that `rank` entries of a sample reach; one program."""
    number = tl.arange(0, SAMPLE)
    x = tl.load(entries + number.to(tl.int64) * stride, mask=number < sampled, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    found = 0
    for step in range(31 - COARSE):
        higher = found | (1 << (30 - step))
        found = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= rank, higher, found)
    tl.store(bounds, found)


@triton.jit
def popcount(word):
    """Count the bits of a word that are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@triton.jit
def mark(entries, bounds, words, passed_counts, numel, WORDS: tl.constexpr):
    """Set a bit for each entry that reaches the threshold, and count them."""
    program = tl.program_id(0)
    word, bit = program * WORDS + tl.arange(0, WORDS), tl.arange(0, 32)[None, :]
    place = word.to(tl.int64)[:, None] * 32 + bit
    x = tl.load(entries + place, mask=place < numel, other=0.0)
    passes = ((x.to(tl.int32, bitcast=True) & MAGNITUDE) >= tl.load(bounds)) & (place < numel)
    packed = tl.sum(tl.where(passes, 1 << bit, 0), axis=1)
    tl.store(words + word, packed)
    tl.store(passed_counts + program, tl.sum(popcount(packed)))


@triton.jit
def collect(
    entries,
    words,
    ends,
    bounds,
    values,
    offsets,
    capacity,
    WORDS: tl.constexpr,
    MARKED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Copy the marked entries, in order, with their places in their pages; find the largest magnitude."""
    program = tl.program_id(0)
    word = program * WORDS + tl.arange(0, WORDS)
    left = tl.load(words + word)
    many = popcount(left)
    before = tl.load(ends + program * (WORDS // MARKED) - 1, mask=program > 0, other=0)
    to = before + tl.cumsum(many) - many
    largest = tl.zeros((WORDS,), tl.int32)
    for _ in range(tl.max(many)):
        there = (left != 0) & (to < capacity)
        place = word.to(tl.int64) * 32 + popcount((left & -left) - 1)  # the lowest bit that is left
        x = tl.load(entries + place, mask=there, other=0.0)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & MAGNITUDE)
        tl.store(values + to, x, mask=there)
        tl.store(offsets + to, (place % PAGE).to(tl.uint16), mask=there)
        left = left & (left - 1)
        to += 1
    tl.atomic_max(bounds + 1, tl.max(largest), sem="relaxed")


@triton.jit
def candidates(entries, numel, collected, capacity, ends, parts, bounds, count):
    """Return which entries to search: whether those collected; their values, their number, the magnitude that
    theirs are relative to, and by how much the largest exceeds it."""
    passed = tl.load(ends + parts - 1)
    collected_fit = (passed >= count) & (passed <= capacity)
    base = tl.load(bounds)
    return (
        collected_fit,
        tl.where(collected_fit, collected, entries),
        tl.where(collected_fit, passed, numel).to(tl.int64),
        tl.where(collected_fit, base, 0),
        tl.where(collected_fit, tl.load(bounds + 1) - base, MAGNITUDE),
    )


@triton.jit
def extent(page, collected_fit, ends, numel, PAGE: tl.constexpr, PARTS: tl.constexpr):
    """Return where a page's candidates begin and end."""
    begin = page.to(tl.int64) * PAGE
    first = tl.load(ends + page * PARTS - 1, mask=page > 0, other=0).to(tl.int64)
    last = tl.load(ends + page * PARTS + PARTS - 1).to(tl.int64)
    return tl.where(collected_fit, first, begin), tl.where(
        collected_fit, last, tl.minimum(begin + PAGE, numel)
    )


@triton.jit
def key(values, place, inside, base):
    """Return a magnitude relative to `base`."""
    x = tl.load(values + place, mask=inside, other=0.0)
    return (x.to(tl.int32, bitcast=True) & MAGNITUDE) - base


@triton.jit
def descend(tally, rank):
    """Return the digit of the entry of that rank, and its rank among the entries with that digit.

    Rank 1 is the largest entry. Where none were counted, the digit is 0.
    """
    digit = tl.arange(0, DIGITS)
    here = tl.load(tally + digit)
    from_here = tl.sum(here) - tl.cumsum(here) + here
    found = tl.maximum(0, tl.sum((from_here >= rank).to(tl.int32)) - 1)
    return found, rank - tl.sum(tl.where(digit > found, here, 0))


@triton.jit
def count_digits(
    entries,
    numel,
    collected,
    capacity,
    ends,
    parts,
    bounds,
    count,
    tallies,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count each digit at a level, over entries whose higher digits are those found.

    The highest digit is mostly 0 for all entries: then none is read.
    """
    _, values, many, base, highest = candidates(
        entries, numel, collected, capacity, ends, parts, bounds, count
    )
    if LEVEL == 0:
        many = tl.where(highest >> 24 == 0, 0, many)
    prefix, rank = 0, count
    for level in tl.static_range(LEVEL):
        digit, rank = descend(tallies + level * DIGITS, rank)
        prefix = prefix * DIGITS + digit
    counted = tl.zeros((DIGITS,), tl.int32)
    digits = tl.arange(0, DIGITS)
    for low in range(tl.program_id(0).to(tl.int64) * BLOCK, many, tl.num_programs(0) * BLOCK):
        place = low + tl.arange(0, BLOCK)
        number = key(values, place, place < many, base) >> (24 - 8 * LEVEL)
        counts = place < many
        if LEVEL > 0:
            counts = counts & ((number >> 8) == prefix)
        own = number & (DIGITS - 1)
        found = tl.sum(counts.to(tl.int32))
        if found < BLOCK // 128:  # adding a collected_fit one by one is faster
            tl.atomic_add(tallies + LEVEL * DIGITS + own, 1, mask=counts, sem="relaxed")
        else:  # the others are counted as zeros, and subtracted
            counted += tl.histogram(tl.where(counts, own, 0), DIGITS)
            counted -= tl.where(digits == 0, BLOCK - found, 0)
    tl.atomic_add(tallies + LEVEL * DIGITS + digits, counted, mask=counted > 0, sem="relaxed")


@triton.jit
def count_selected(
    entries,
    numel,
    collected,
    capacity,
    ends,
    parts,
    bounds,
    count,
    tallies,
    found,
    selected,
    LEVELS: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count a page's entries above the magnitude of rank `count`, and those equal to it.

    The counts are the high and the low half of one number. The first program also stores that magnitude,
    relative to the base, and how many of its equals are needed.
    """
    collected_fit, values, _, base, _ = candidates(
        entries, numel, collected, capacity, ends, parts, bounds, count
    )
    page = tl.program_id(0)
    least, rank = 0, count
    for level in tl.static_range(LEVELS):
        digit, rank = descend(tallies + level * DIGITS, rank)
        least = least * DIGITS + digit
    if page == 0:
        tl.store(found, least)
        tl.store(found + 1, rank)
    first, last = extent(page, collected_fit, ends, numel, PAGE, PARTS)
    above = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for low in range(first, last, BLOCK):
        place = low + tl.arange(0, BLOCK)
        number = key(values, place, place < last, base)
        above += ((place < last) & (number > least)).to(tl.int32)
        equal += ((place < last) & (number == least)).to(tl.int32)
    tl.store(selected + page, (tl.sum(above).to(tl.int64) << 32) + tl.sum(equal))


@triton.jit
def fill(
    entries,
    numel,
    collected,
    capacity,
    ends,
    parts,
    bounds,
    count,
    offsets,
    found,
    selected,
    counts,
    chosen,
    places,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a page's part of the packet. `selected` are running sums over the pages."""
    collected_fit, values, _, base, _ = candidates(
        entries, numel, collected, capacity, ends, parts, bounds, count
    )
    page = tl.program_id(0)
    least, needed = tl.load(found), tl.load(found + 1)
    before = tl.load(selected + page - 1, mask=page > 0, other=0)
    equals = (before & 0xFFFFFFFF).to(tl.int32)
    start = (before >> 32).to(tl.int32) + tl.minimum(equals, needed)
    end = start
    first, last = extent(page, collected_fit, ends, numel, PAGE, PARTS)
    for low in range(first, last, BLOCK):
        place = low + tl.arange(0, BLOCK)
        number = key(values, place, place < last, base)
        equal = ((place < last) & (number == least)).to(tl.int32)
        needs = equals + tl.cumsum(equal) <= needed
        taken = (place < last) & ((number > least) | ((equal > 0) & needs))
        to = end + tl.cumsum(taken.to(tl.int32)) - 1
        goes = taken & (to < count)
        tl.store(chosen + to, tl.load(values + place, mask=goes, other=0.0), mask=goes)
        offset = tl.load(offsets + tl.where(collected_fit, place, 0), mask=goes, other=0)
        offset = tl.where(collected_fit, offset, (place - page.to(tl.int64) * PAGE).to(tl.uint16))
        tl.store(places + to, offset, mask=goes)
        equals += tl.sum(equal)
        end += tl.sum(taken.to(tl.int32))
    tl.store(counts + page, end - start)
