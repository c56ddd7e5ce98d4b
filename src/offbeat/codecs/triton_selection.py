"""The kernels of `selection.py`.

Magnitudes are compared as whole numbers, by the bits of a float without its sign: their order is the same,
and a NaN is the largest of all. A sample gives a threshold that somewhat more than `count` entries pass; one
pass over memory marks those, and they are collected in order; the one of rank `count` among them is found
digit by digit, eight bits at a time, by counting how many there are of each; and those above it, with as
many of its equals as are still needed, go into the packet, page by page.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
COARSE = tl.constexpr(15)  # bits that a threshold by sample does without: it is exact to 1 part in 256
DIGITS = tl.constexpr(256)
TOP = tl.constexpr((1 << 24) - 1)  # three digits: what is four times the threshold or more counts as that


@triton.jit
def guess(entries, threshold, stride, sampled, rank, SAMPLE: tl.constexpr):
    """A magnitude that `rank` entries of a sample are not below, bit by bit, by one program."""
    number = tl.arange(0, SAMPLE)
    x = tl.load(entries + number.to(tl.int64) * stride, mask=number < sampled, other=0.0)
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    found = 0
    for step in range(31 - COARSE):
        higher = found | (1 << (30 - step))
        found = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= rank, higher, found)
    tl.store(threshold, found)


@triton.jit
def ones(word):
    """How many bits of a word are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@triton.jit
def mark(entries, threshold, words, founds, numel, WORDS: tl.constexpr, PAGE: tl.constexpr):
    """A bit for each entry: whether it is not below the threshold; and how many are in each page."""
    program = tl.program_id(0)
    word, bit = program * WORDS + tl.arange(0, WORDS), tl.arange(0, 32)[None, :]
    place = word.to(tl.int64)[:, None] * 32 + bit
    x = tl.load(entries + place, mask=place < numel, other=0.0)
    passes = ((x.to(tl.int32, bitcast=True) & MAGNITUDE) >= tl.load(threshold)) & (place < numel)
    packed = tl.sum(tl.where(passes, 1 << bit, 0), axis=1)
    tl.store(words + word, packed)
    tl.atomic_add(founds + program * WORDS // (PAGE // 32), tl.sum(ones(packed)), sem="relaxed")


@triton.jit
def collect(entries, words, ends, values, offsets, room, WORDS: tl.constexpr, PAGE: tl.constexpr):
    """A page's marked entries, in order, and where in the page they are."""
    page = tl.program_id(0)
    to_page = tl.load(ends + page - 1, mask=page > 0, other=0)
    for low in range(0, PAGE // 32, WORDS):
        word = low + tl.arange(0, WORDS)
        left = tl.load(words + page.to(tl.int64) * (PAGE // 32) + word)
        many = ones(left)
        to = to_page + tl.cumsum(many) - many
        for _ in range(tl.max(many)):
            there = (left != 0) & (to < room)
            offset = word * 32 + ones((left & -left) - 1)  # of the lowest bit that is left
            x = tl.load(entries + page.to(tl.int64) * PAGE + offset, mask=there, other=0.0)
            tl.store(values + to, x, mask=there)
            tl.store(offsets + to, offset.to(tl.uint16), mask=there)
            left = left & (left - 1)
            to += 1
        to_page += tl.sum(many)


@triton.jit
def descend(tally, rank):
    """The digit of the one of that rank, counted from the highest; and its rank among those that share it."""
    digit = tl.arange(0, DIGITS)
    here = tl.load(tally + digit)
    from_here = tl.sum(here) - tl.cumsum(here) + here
    found = tl.maximum(0, tl.sum((from_here >= rank).to(tl.int32)) - 1)
    return found, rank - tl.sum(tl.where(digit > found, here, 0))


@triton.jit
def key(values, place, inside, base):
    """By how much a magnitude is above the threshold."""
    x = tl.load(values + place, mask=inside, other=0.0)
    return tl.minimum((x.to(tl.int32, bitcast=True) & MAGNITUDE) - base, TOP)


@triton.jit
def count_digits(values, threshold, passed, tallies, room, rank, LEVEL: tl.constexpr, BLOCK: tl.constexpr):
    """How many there are of each digit at a level, of those that have the digits found above it."""
    base, last = tl.load(threshold), tl.minimum(tl.load(passed), room)
    prefix = 0
    for level in tl.static_range(LEVEL):
        digit, rank = descend(tallies + level * DIGITS, rank)
        prefix = prefix * DIGITS + digit
    counted = tl.zeros((DIGITS,), tl.int32)
    digits = tl.arange(0, DIGITS)
    for low in range(tl.program_id(0) * BLOCK, last, tl.num_programs(0) * BLOCK):
        place = low + tl.arange(0, BLOCK)
        number = key(values, place, place < last, base) >> (16 - 8 * LEVEL)
        counts = place < last
        if LEVEL > 0:
            counts = counts & ((number >> 8) == prefix)
        others = BLOCK - tl.sum(counts.to(tl.int32))  # which are counted as zeros at first
        counted += tl.histogram(tl.where(counts, number & (DIGITS - 1), 0), DIGITS)
        counted -= tl.where(digits == 0, others, 0)
    tl.atomic_add(tallies + LEVEL * DIGITS + digits, counted, mask=counted > 0, sem="relaxed")


@triton.jit
def weigh(values, threshold, ends, tallies, room, rank, found, weights, BLOCK: tl.constexpr):
    """How many of a page's entries are above the one of that rank, in the high half, and equal to it, in the
    low one. The first program tells by how much that one is above the threshold, how many of its equals are
    needed, and how many entries passed: none, if it lies beyond what three digits tell."""
    page = tl.program_id(0)
    least = 0
    for level in tl.static_range(3):
        digit, rank = descend(tallies + level * DIGITS, rank)
        least = least * DIGITS + digit
    if page == 0:
        tl.store(found, least)
        tl.store(found + 1, rank)
        tl.store(found + 2, tl.where(least == TOP, 0, tl.load(ends + tl.num_programs(0) - 1)))
    base, last = tl.load(threshold), tl.minimum(tl.load(ends + page), room)
    above = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for low in range(tl.load(ends + page - 1, mask=page > 0, other=0), last, BLOCK):
        place = low + tl.arange(0, BLOCK)
        number = key(values, place, place < last, base)
        above += ((place < last) & (number > least)).to(tl.int32)
        equal += ((place < last) & (number == least)).to(tl.int32)
    tl.store(weights + page, (tl.sum(above).to(tl.int64) << 32) + tl.sum(equal))


@triton.jit
def fill(
    values,
    offsets,
    threshold,
    ends,
    room,
    found,
    weights,
    counts,
    chosen,
    places,
    count,
    BLOCK: tl.constexpr,
):
    """A page's part of the packet. `weights` are added up, over all pages until this one."""
    page = tl.program_id(0)
    base, least, needed = tl.load(threshold), tl.load(found), tl.load(found + 1)
    before = tl.load(weights + page - 1, mask=page > 0, other=0)
    equals = (before & 0xFFFFFFFF).to(tl.int32)
    start = (before >> 32).to(tl.int32) + tl.minimum(equals, needed)
    end, last = start, tl.minimum(tl.load(ends + page), room)
    for low in range(tl.load(ends + page - 1, mask=page > 0, other=0), last, BLOCK):
        place = low + tl.arange(0, BLOCK)
        number = key(values, place, place < last, base)
        equal = ((place < last) & (number == least)).to(tl.int32)
        needs = equals + tl.cumsum(equal) <= needed
        taken = (place < last) & ((number > least) | ((equal > 0) & needs))
        to = end + tl.cumsum(taken.to(tl.int32)) - 1
        goes = taken & (to < count)
        tl.store(chosen + to, tl.load(values + place, mask=goes, other=0.0), mask=goes)
        tl.store(places + to, tl.load(offsets + place, mask=goes, other=0), mask=goes)
        equals += tl.sum(equal)
        end += tl.sum(taken.to(tl.int32))
    tl.store(counts + page, end - start)
