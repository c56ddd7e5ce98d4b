"""Where we differ from GSSP's authors: what a group tells the others, and of which entries GDTopK sends most.

    python -m benchmarks run gssp_choices told [--epochs 10] [--seeds 20 21 …] [--optimizers adam]
    python -m benchmarks run gssp_choices entries [the same options]

Task and cluster are those of `pushes`: the digits with an MLP, 16 workers in virtual time on paper-gssp, one
server, equal work. With `push="gradient"` each group has an optimizer of its own, and after |G| pushes tells
the other groups

    the change      by how much they moved its weights (ours); the others add it
    the sum         the sum of their gradients; the others step with it, as they do with a push (the authors')
    the mean        their mean; the others step with it at |G| times the learning rate

GDTopK sends a fraction of the entries: the largest of a shard's slice of the weights (ours), or the largest
of each parameter (the authors'). Test accuracy after the last step: the mean over seeds that chose no
setting, lowest and highest; the pairs of a seed have the same initial weights, batches and step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.strategies.pushes import RATES, SmallDigits, accuracy
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, spread
from offbeat import GSSP, GDTopK, Replica, Strategy, TopK
from offbeat.codecs import Codec
from offbeat.codecs.base import Sparse
from offbeat.codecs.index_coding import encode_indices
from offbeat.codecs.topk import full_topk, split_packet
from offbeat.server.half import ServerHalf
from offbeat.server.messages import Push, Tensors
from offbeat.strategies.gssp.aggregation import Group, PerGroup
from offbeat.strategies.gssp.rule import GroupClocks


class Told(PerGroup):
    """Groups that tell each other the sum of their gradients, with which every other group's optimizer steps.

    An evaluation reads the first group's weights: what is still to be told cannot be added to them.
    """

    mean = False

    def apply_push(self, state: GroupClocks, push: Push) -> None:
        number = state.group[push.worker]
        group = self._groups[number]
        group.apply(group.weights, push)
        if len(self._groups) > 1:
            torch._foreach_add_(group.pending, push.update)
            group.pushes += 1
            self._latest = push  # for its learning rates: all workers have the same
            if group.pushes >= state.size(number):
                self._propagate(group)

    def _propagate(self, group: Group) -> None:
        if not group.pushes:
            return
        report = self._latest.report
        if self.mean:
            torch._foreach_div_(group.pending, group.pushes)
            report = (group.pushes * report[0], *report[1:])
        for other in self._groups:
            if other is not group:
                other.apply(other.weights, replace(self._latest, update=group.pending, report=report))
        torch._foreach_zero_(group.pending)
        group.pushes = 0

    def _all_pushed(self) -> Tensors:
        return self._groups[0].weights


class ToldMean(Told):
    """The same with the mean of a group's gradients, at as many times the learning rate."""

    mean = True


@dataclass(frozen=True, kw_only=True)
class SumGSSP(GSSP):
    """GSSP whose groups tell each other sums of gradients."""

    aggregation: ClassVar[type[PerGroup]] = Told

    def server_half(self) -> ServerHalf:
        return replace(super().server_half(), aggregation=self.aggregation)


@dataclass(frozen=True, kw_only=True)
class MeanGSSP(SumGSSP):
    """GSSP whose groups tell each other means of gradients."""

    aggregation: ClassVar[type[PerGroup]] = ToldMean


@lru_cache(maxsize=1)
def spans() -> list[tuple[int, int]]:
    """Return where each parameter of the model lies in its flat weights, in order."""
    with torch.random.fork_rng():  # a model is built: the run's draws must not change
        blocks = Replica(SmallDigits().build()).blocks
    places = [place for block in blocks for place in block.places()]
    return sorted((begin, begin + param.numel()) for param, begin in places)


@dataclass(frozen=True)
class TensorTopK(TopK):
    """A codec that sends the fraction `ratio` of the entries of each parameter."""

    def count(self, numel: int) -> int:
        return sum(count for _, _, count in self._shares)

    @property
    def _shares(self) -> list[tuple[int, int, int]]:
        """Begin and end of each parameter, and how many of its entries are sent."""
        return [(begin, end, Sparse.count(self, end - begin)) for begin, end in spans()]

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        counts, values, entries = split_packet(packet, tensor)
        chosen = torch.cat([begin + full_topk(tensor[begin:end], k) for begin, end, k in self._shares])
        torch.index_select(tensor, 0, chosen, out=values)
        encode_indices(chosen, tensor.numel(), counts, entries)


@dataclass(frozen=True, kw_only=True)
class TensorGDTopK(GDTopK):
    """GDTopK whose entries are the largest of each parameter."""

    @cached_property
    def push_codecs(self) -> tuple[Codec, ...]:
        return tuple(TensorTopK(ratio) for ratio in self._ratios)


def told() -> dict[str, Strategy[Any]]:
    """Return what a group may tell the others."""
    return {
        "the change": GSSP(push="gradient"),
        "the sum": SumGSSP(push="gradient"),
        "the mean": MeanGSSP(push="gradient"),
    }


def entries() -> dict[str, Strategy[Any]]:
    """Return the ways to choose entries, and GSSP without sparsity."""
    found: dict[str, Strategy[Any]] = {}
    for push in ("update", "gradient"):
        found[f"all entries, {push}"] = GSSP(push=push)
        for floor in ("0.05", "0"):
            of_slice, of_tensor = GDTopK(floor=float(floor)), TensorGDTopK(floor=float(floor))
            found[f"of the slice, floor {floor}, {push}"] = GSSP(push=push, sparse=of_slice)
            found[f"of each parameter, floor {floor}, {push}"] = GSSP(push=push, sparse=of_tensor)
    return found


QUESTIONS = {"told": told, "entries": entries}


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("gssp_choices", __doc__)
    parser.add_argument("question", choices=list(QUESTIONS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22, 23])
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rates = [(kind, rate) for kind in options.optimizers for rate in RATES[kind]]
    columns = [options.question, *(f"{kind}, {rate}" for kind, rate in rates)]
    table = Table("gssp_choices", __doc__ or "", columns, options.question)
    for name, strategy in QUESTIONS[options.question]().items():
        cells = [
            [accuracy(strategy, kind, rate, seed, options.epochs) for seed in options.seeds]
            for kind, rate in rates
        ]
        table.row(name, *(spread(values, 1) for values in cells))
    table.write()
