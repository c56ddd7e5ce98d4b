"""Counts by hand of the bytes that a rank sends under each strategy, made from the model's shapes alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from offbeat import OSP, SSDSGD, DiLoCo
from offbeat.core.blocks import block_sizes, make_blocks, trainable_bytes

Count = Callable[[nn.Module, int, int], int]
RankCount = Callable[[nn.Module, int, int, int, str], int]  # and the optimizer's name
FLAG = 4  # one float32
SAMPLES = 8  # one float64: the samples that all have seen


def ring(nbytes: int, world: int) -> int:
    """What a ring all-reduce sends out of each NIC."""
    return 2 * nbytes * (world - 1) // world


def weights(model: nn.Module) -> int:
    """The flat weights: every trainable parameter begins at a multiple of 64 bytes."""
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    return sum((size + 63) // 64 * 64 for size in sizes)


def marked_gradients(model: nn.Module) -> int:
    """The flat gradients, laid out like the weights, and one mark for each parameter."""
    return weights(model) + sum(p.element_size() for p in model.parameters() if p.requires_grad)


def statistics(model: nn.Module) -> int:
    """Floating-point buffers, as they are."""
    return sum(b.numel() * b.element_size() for b in model.buffers() if b.is_floating_point())


def bsp(model: nn.Module, steps: int, world: int) -> int:
    return steps * ring(marked_gradients(model) + statistics(model), world)


def topk_of_blocks(model: nn.Module, ratio: float) -> int:
    """A packet for each block: k values, each with an index of 2 bytes, and a count of 4 bytes for every
    65,536 entries where there are more than these."""
    nbytes = 0
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    for block in make_blocks(trained, *block_sizes(trainable_bytes(model))):
        count = max(1, round(ratio * block.numel))
        pages = -(-block.numel // 65536) if block.numel > 65536 else 0
        nbytes += count * (block.params[0].element_size() + 2) + 4 * pages
    return nbytes


def bsp_topk(ratio: float) -> Count:
    """Packets to all others, and the largest of one mark a parameter."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        marks = 4 * sum(p.requires_grad for p in model.parameters())
        dense = ring(marks, world) + ring(statistics(model), world)
        return steps * ((world - 1) * topk_of_blocks(model, ratio) + dense)

    return sent


def local_sgd_topk(period: int, ratio: float) -> Count:
    def sent(model: nn.Module, steps: int, world: int) -> int:
        packets = (world - 1) * topk_of_blocks(model, ratio)
        return steps // period * (packets + ring(statistics(model), world))

    return sent


def sparse_loco(period: int, ratio: float, chunk: int) -> Count:
    """A packet to each of the others: k entries per chunk, with indices of a byte and values of 2 bits; and a
    scale of 4 bytes, or a float64's 8, for every 1024 of them."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        nbytes = 0
        trained = [p for p in model.parameters() if p.requires_grad]
        for dtype in {p.dtype for p in trained}:
            sizes = [p.numel() * dtype.itemsize for p in trained if p.dtype == dtype]
            numel = sum((size + 63) // 64 * 64 for size in sizes) // dtype.itemsize
            whole, rest = divmod(numel, chunk)
            count = whole * max(1, round(ratio * chunk)) + (max(1, round(ratio * rest)) if rest else 0)
            full, left = divmod(count, 1024)
            nbytes += count + max(4, dtype.itemsize) * -(-count // 1024) + 256 * full + -(-left // 4)
        return steps // period * ((world - 1) * nbytes + ring(statistics(model), world))

    return sent


def local_sgd(period: int, more: int = 0) -> Count:
    """`more`: what else travels when weights do."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        return steps // period * ring(weights(model) + statistics(model) + more, world)

    return sent


def local_sgd_moments(period: int, *of_moments: int) -> Count:
    """Moments are laid out as the weights, in float32 or wider, and have one mark for each parameter."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        trained = [(p.numel(), p.element_size()) for p in model.parameters() if p.requires_grad]
        moments = sum(((numel * size + 63) // 64 * 64 // size + 1) * max(4, size) for numel, size in trained)
        averages = sum(steps // each for each in of_moments)
        return local_sgd(period)(model, steps, world) + averages * ring(moments, world)

    return sent


def diloco(strategy: DiLoCo) -> RankCount:
    """Fragments in turn, each an even part of the weights of a kind, in steps of 64 bytes. A fragment goes to
    its owners, who have even parts of it, `delay` steps before its turn, and comes back in half that time.
    Eager ones go when it is their turn, and come back after half a period. Statistics go with the last."""
    of, every = strategy.fragments, strategy.period // strategy.fragments

    def turns(steps_ahead: int) -> list[int]:
        return [turn % of for turn in range(steps_ahead // every)]

    def sent(model: nn.Module, steps: int, world: int, rank: int, optimizer: str) -> int:
        there, back = turns(steps + strategy.delay), turns(steps + strategy.delay // 2)
        if strategy.eager:
            back = turns(steps - (every - every // 2))
        total = 0
        for dtype in {p.dtype for p in model.parameters()}:
            lines = sum(
                (p.numel() * p.element_size() + 63) // 64
                for p in model.parameters()
                if p.requires_grad and p.dtype == dtype
            )
            sizes = [lines * (i + 1) // of - lines * i // of for i in range(of)]
            owned = [n * (rank + 1) // world - n * rank // world for n in sizes]
            total += 64 * sum(sizes[i] - owned[i] for i in there)
            total += 64 * sum((world - 1) * owned[i] for i in back)
        if strategy.outlier_cosine is not None:  # a norm and 1024 numbers, of 8 bytes, to each of the others
            total += len(there) * (world - 1) * 8 * 1025
        return total + there.count(of - 1) * ring(statistics(model), world)

    return sent


def selsync(window: int, layout: Callable[[nn.Module], int], period: int = 1) -> Count:
    """`layout`: what travels in the window; after it only flags, as long as no gradient changes enough."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        full, asked = min(steps, window), max(0, steps - window) // period
        return full * ring(layout(model) + statistics(model), world) + asked * ring(FLAG, world)

    return sent


Pieces = list[tuple[int, int]]


def even_shares(model: nn.Module, world: int) -> list[tuple[int, int, Pieces]]:
    """For each kind of parameters the bytes of an element and of a share, and where each parameter lies.

    Parameters lie in backward order. Shares are of one size, in whole lines of 64 bytes.
    """
    shares = []
    for dtype in {p.dtype for p in model.parameters()}:
        ends, total = [], 0
        for p in reversed([p for p in model.parameters() if p.requires_grad and p.dtype == dtype]):
            ends.append((total, total + p.numel() * p.element_size()))
            total += (p.numel() * p.element_size() + 63) // 64 * 64
        shares.append((dtype.itemsize, (total // 64 + world - 1) // world * 64, ends))
    return shares


def cut(pieces: Pieces, start: int, stop: int) -> list[int]:
    """The bytes of each parameter between two places."""
    return [min(b, stop) - max(a, start) for a, b in pieces if a < stop and b > start]


STATE = {"sgd": (0, 0), "momentum": (1, 0), "adamw": (2, 1)}  # tensors and counters of a parameter


def ssd_sgd(strategy: SSDSGD) -> RankCount:
    """A push every step, with a mark a parameter, as many in each share; in each step but the first a part of
    a pull, 0 in the step after a period, then the next, as far as there are parts; and statistics in the step
    that uses part 0. A part of the weights is pulled as it lies. The state of each piece of a parameter
    travels in whole lines; then a mark and the counters of all pieces, of 8 bytes; all workers send as much
    as the one with the most. The authors' rule pulls weights alone."""
    delay, parts, authors = strategy.delay, strategy.parts, strategy.rule == "authors"

    def sent(model: nn.Module, steps: int, world: int, rank: int, optimizer: str) -> int:
        later = max(0, steps - strategy.warmup)
        tensors, counters = STATE[optimizer]
        out = 0
        for itemsize, share, pieces in even_shares(model, world):
            marks = max(len(cut(pieces, k * share, (k + 1) * share)) for k in range(world))
            out += later * (share + marks * itemsize)

            def state(start: int, stop: int, pieces: Pieces = pieces) -> int:
                sizes = cut(pieces, start, stop)
                return tensors * sum(map(lines, sizes)) + lines(8 * len(sizes) * (1 + counters))

            for turn in [t % delay for t in range(1, later) if t % delay < parts]:
                start, stop = (share // 64 * n // parts * 64 for n in (turn, turn + 1))
                out += stop - start
                if tensors and not authors:
                    out += max(state(start + k * share, stop + k * share) for k in range(world))
        used = max(0, later - (1 if authors else 2)) // delay
        warm_up = bsp(model, min(steps, strategy.warmup), world)
        return warm_up + (world - 1) * out + used * ring(statistics(model), world)

    return sent


def lines(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


def osp(strategy: OSP) -> Count:
    """As BSP, in two parts; and, in steps 2, 10, 18 and so on, two numbers and one a block, of 8 bytes."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        layout = strategy.layout(model)
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        blocks = make_blocks(trained, layout.first_bytes, layout.block_bytes, layout.isolate)
        return bsp(model, steps, world) + -(-(steps - 1) // 8) * ring(8 * (2 + len(blocks)), world)

    return sent


def served(model: nn.Module, steps: int, world: int) -> int:
    """Every rank a host with a shard: all but its own share is pushed, and its shard answers all others. The
    last answers are under way when the loop ends."""
    return (2 * steps - 1) * weights(model) * (world - 1) // world


def oscars(model: nn.Module, steps: int, world: int) -> int:
    """As above, with every answer; one step at a time until all are timed, in the third, and then three."""
    rounds = min(steps, 3) + max(0, steps - 3) // 3
    return 2 * rounds * weights(model) * (world - 1) // world


def diloco_served(period: int) -> Count:
    """As `served`, once in a period, with every answer."""
    return lambda model, steps, world: 2 * (steps // period) * weights(model) * (world - 1) // world


def ssd_sgd_served(warmup: int, delay: int) -> RankCount:
    """As `served`; a push waits for all that was asked for before, and the last but one has come. With each
    pull comes the optimizer's state, counters as long as the weights; so with the last one of the warm-up."""

    def sent(model: nn.Module, steps: int, world: int, rank: int, optimizer: str) -> int:
        later, state = max(0, steps - warmup), sum(STATE[optimizer])
        pulled = min(steps, warmup) + state * (0 < warmup <= steps)
        pulled += (1 + state) * (max(0, later - 2) // delay)
        return (steps + pulled) * weights(model) * (world - 1) // world

    return sent


# --- the table
