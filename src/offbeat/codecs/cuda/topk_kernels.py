"""The kernels of `selection.py`.

Magnitudes are compared as whole numbers, by the bits of a float without its sign: their order is the same,
and a NaN is the largest of all. A sample gives a threshold that somewhat more than `count` entries pass; one
pass over memory marks those, and they are collected in order; the one of rank `count` among them is found
digit by digit, eight bits at a time, by counting how many there are of each; and those above it, with as
many of its equals as are still needed, go into the packet, page by page.

Where too few passed, or more than there is room for, all entries take the place of those collected, and 0
that of the threshold. Whichever it is, `crowd` tells.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
COARSE = tl.constexpr(15)  # bits that a threshold by sample does without: it is exact to 1 part in 256
DIGITS = tl.constexpr(256)


@triton.jit
def guess(entries, bounds, stride, sampled, rank, SAMPLE: tl.constexpr):
    """A magnitude that `rank` entries of a sample are not below, bit by bit, by one program."""
    number = tl.arange(0, SAMPLE)
    x = tl.load(entries + number.to(tl.int64) * stride, mask=number < sampled, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    found = 0
    for step in range(31 - COARSE):
        higher = found | (1 << (30 - step))
        found = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= rank, higher, found)
    tl.store(bounds, found)


@triton.jit
def ones(word):
    """How many bits of a word are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@triton.jit
def mark(entries, bounds, words, founds, numel, WORDS: tl.constexpr):
    """A bit for each entry: whether it is not below the threshold; and how many are not."""
    program = tl.program_id(0)
    word, bit = program * WORDS + tl.arange(0, WORDS), tl.arange(0, 32)[None, :]
    place = word.to(tl.int64)[:, None] * 32 + bit
    x = tl.load(entries + place, mask=place < numel, other=0.0)
    passes = ((x.to(tl.int32, bitcast=True) & MAGNITUDE) >= tl.load(bounds)) & (place < numel)
    packed = tl.sum(tl.where(passes, 1 << bit, 0), axis=1)
    tl.store(words + word, packed)
    tl.store(founds + program, tl.sum(ones(packed)))


@triton.jit
def collect(
    entries,
    words,
    ends,
    bounds,
    values,
    offsets,
    room,
    WORDS: tl.constexpr,
    MARKED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The marked entries, in order, and where in their page they are; and the largest of all magnitudes."""
    program = tl.program_id(0)
    word = program * WORDS + tl.arange(0, WORDS)
    left = tl.load(words + word)
    many = ones(left)
    before = tl.load(ends + program * (WORDS // MARKED) - 1, mask=program > 0, other=0)
    to = before + tl.cumsum(many) - many
    largest = tl.zeros((WORDS,), tl.int32)
    for _ in range(tl.max(many)):
        there = (left != 0) & (to < room)
        place = word.to(tl.int64) * 32 + ones((left & -left) - 1)  # of the lowest bit that is left
        x = tl.load(entries + place, mask=there, other=0.0)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & MAGNITUDE)
        tl.store(values + to, x, mask=there)
        tl.store(offsets + to, (place % PAGE).to(tl.uint16), mask=there)
        left = left & (left - 1)
        to += 1
    tl.atomic_max(bounds + 1, tl.max(largest), sem="relaxed")


@triton.jit
def crowd(entries, numel, collected, room, ends, parts, bounds, count):
    """Among whom to look: whether it is those collected; their values, how many they are, the magnitude from
    which theirs are counted, and by how much the largest is above it."""
    passed = tl.load(ends + parts - 1)
    few = (passed >= count) & (passed <= room)
    base = tl.load(bounds)
    return (
        few,
        tl.where(few, collected, entries),
        tl.where(few, passed, numel).to(tl.int64),
        tl.where(few, base, 0),
        tl.where(few, tl.load(bounds + 1) - base, MAGNITUDE),
    )


@triton.jit
def extent(page, few, ends, numel, PAGE: tl.constexpr, PARTS: tl.constexpr):
    """From where to where a page's part of the crowd goes."""
    begin = page.to(tl.int64) * PAGE
    first = tl.load(ends + page * PARTS - 1, mask=page > 0, other=0).to(tl.int64)
    last = tl.load(ends + page * PARTS + PARTS - 1).to(tl.int64)
    return tl.where(few, first, begin), tl.where(few, last, tl.minimum(begin + PAGE, numel))


@triton.jit
def key(values, place, inside, base):
    """By how much a magnitude is above the one from which they are counted."""
    x = tl.load(values + place, mask=inside, other=0.0)
    return (x.to(tl.int32, bitcast=True) & MAGNITUDE) - base


@triton.jit
def descend(tally, rank):
    """The digit of the one of that rank, counted from the highest; and its rank among those that share it.
    Where none were counted, it is 0."""
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
    room,
    ends,
    parts,
    bounds,
    count,
    tallies,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many there are of each digit at a level, of those that have the digits found above it. The highest
    is mostly 0 for all: then nobody is looked at."""
    _, values, many, base, highest = crowd(entries, numel, collected, room, ends, parts, bounds, count)
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
        if found < BLOCK // 128:  # a few are sooner added one by one
            tl.atomic_add(tallies + LEVEL * DIGITS + own, 1, mask=counts, sem="relaxed")
        else:  # all others are counted as zeros at first
            counted += tl.histogram(tl.where(counts, own, 0), DIGITS)
            counted -= tl.where(digits == 0, BLOCK - found, 0)
    tl.atomic_add(tallies + LEVEL * DIGITS + digits, counted, mask=counted > 0, sem="relaxed")


@triton.jit
def weigh(
    entries,
    numel,
    collected,
    room,
    ends,
    parts,
    bounds,
    count,
    tallies,
    found,
    weights,
    LEVELS: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many of a page's entries are above the one of rank `count`, in the high half, and equal to it, in
    the low one. The first program tells by how much that one is above the base, and how many of its equals
    are needed."""
    few, values, _, base, _ = crowd(entries, numel, collected, room, ends, parts, bounds, count)
    page = tl.program_id(0)
    least, rank = 0, count
    for level in tl.static_range(LEVELS):
        digit, rank = descend(tallies + level * DIGITS, rank)
        least = least * DIGITS + digit
    if page == 0:
        tl.store(found, least)
        tl.store(found + 1, rank)
    first, last = extent(page, few, ends, numel, PAGE, PARTS)
    above = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for low in range(first, last, BLOCK):
        place = low + tl.arange(0, BLOCK)
        number = key(values, place, place < last, base)
        above += ((place < last) & (number > least)).to(tl.int32)
        equal += ((place < last) & (number == least)).to(tl.int32)
    tl.store(weights + page, (tl.sum(above).to(tl.int64) << 32) + tl.sum(equal))


@triton.jit
def fill(
    entries,
    numel,
    collected,
    room,
    ends,
    parts,
    bounds,
    count,
    offsets,
    found,
    weights,
    counts,
    chosen,
    places,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A page's part of the packet. `weights` are added up, over all pages until this one."""
    few, values, _, base, _ = crowd(entries, numel, collected, room, ends, parts, bounds, count)
    page = tl.program_id(0)
    least, needed = tl.load(found), tl.load(found + 1)
    before = tl.load(weights + page - 1, mask=page > 0, other=0)
    equals = (before & 0xFFFFFFFF).to(tl.int32)
    start = (before >> 32).to(tl.int32) + tl.minimum(equals, needed)
    end = start
    first, last = extent(page, few, ends, numel, PAGE, PARTS)
    for low in range(first, last, BLOCK):
        place = low + tl.arange(0, BLOCK)
        number = key(values, place, place < last, base)
        equal = ((place < last) & (number == least)).to(tl.int32)
        needs = equals + tl.cumsum(equal) <= needed
        taken = (place < last) & ((number > least) | ((equal > 0) & needs))
        to = end + tl.cumsum(taken.to(tl.int32)) - 1
        goes = taken & (to < count)
        tl.store(chosen + to, tl.load(values + place, mask=goes, other=0.0), mask=goes)
        offset = tl.load(offsets + tl.where(few, place, 0), mask=goes, other=0)
        offset = tl.where(few, offset, (place - page.to(tl.int64) * PAGE).to(tl.uint16))
        tl.store(places + to, offset, mask=goes)
        equals += tl.sum(equal)
        end += tl.sum(taken.to(tl.int32))
    tl.store(counts + page, end - start)
