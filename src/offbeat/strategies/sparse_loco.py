"""SparseLoCo: local steps, of whose sum a worker sends the largest entries with 2 bits, and keeps the rest.

    every step:      w_i ← the optimizer's step with g_i
    every H steps:   m_i ← β m_i + (w_global − w_i)
                     q_i = C(m_i): the k largest of each chunk of m_i, with 2 bits;   m_i ← m_i − q_i
                     w_global ← w_global − η (1/N) Σ q_j                              plain SGD
                     w_i ← w_global

H is `period`, β `decay`, η `outer_lr`, k `ratio` of a `chunk`. DiLoCo's outer momentum has gone: what a
worker has not sent yet, and forgets slowly, takes its place.

The idea's (arXiv 2508.15706, read in its abstract): a decaying error feedback, 1 to 3% of the entries, chosen
by chunks, 2 bits. Ours: everything else, the defaults of β and of the chunk among it.

- It is `DiLoCo` without momentum, with the codec `error_feedback(topk(ratio, chunk=…, bits=…), decay=β)`:
  w_i − w_global travels, the sign of which does not matter to the codec. `delay`, the published model, batch
  norm's statistics and elastic are DiLoCo's. With β = 0 what is not sent is lost.
- Under elastic, what a lost worker has kept back, and its local steps, are lost with it; w_global is on all.
- Packets go to every worker (N − 1 of them leave a NIC), so they may add up to more than a dense exchange
  where N is beyond some hundred.
- Workers are at w_global after each exchange, whatever they have kept back.
- A single worker sends nothing, and keeps nothing back.

With ratio = 1, `bits=None` and η = 1, nothing is kept back and it is LocalSGD; with other η it is DiLoCo with
outer SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from torch import Tensor

from offbeat.codecs import Codec, ErrorFeedback, TopK
from offbeat.codecs.chunked_topk import MOST
from offbeat.codecs.quantize import BITS
from offbeat.core.fields import Choice, Number, Whole
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.strategies.diloco import DiLoCo, DiLoCoState


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(Strategy[DiLoCoState]):
    """Strategy of local steps, whose sum travels as its largest entries, with error feedback that decays."""

    name = "sparse_loco"
    summary = "step locally; every `period` steps send the largest entries of the change, and keep the rest"

    refused: ClassVar[Mapping[str, str]] = {"codec": "it has its own, by ratio, chunk, bits and decay"}

    period: Annotated[int, Whole("steps from one exchange to the next", at_least=1)] = 32
    outer_lr: Annotated[
        float, Number("learning rate of the outer optimizer", noun="a finite number", above=0)
    ] = 1.0
    decay: Annotated[
        float, Number("factor of what was kept back, at each exchange", at_least=0, at_most=1)
    ] = 0.95
    ratio: Annotated[
        float,
        Number("fraction of the entries that is sent", noun="a fraction of the entries,", above=0, at_most=1),
    ] = 0.02
    chunk: Annotated[int, Whole("entries whose largest are sent", at_least=1, at_most=MOST)] = 4096
    bits: Annotated[int | None, Choice("bits per value; None: values as they are", of=BITS)] = 2
    delay: Annotated[int, Whole("steps of computation that overlap an exchange", at_least=0)] = 0

    def check(self) -> None:
        self._diloco  # noqa: B018  # refuses a delay that is too long

    @cached_property
    def codec(self) -> Codec:
        """The codec of what travels."""
        largest = TopK(self.ratio, chunk=self.chunk, bits=self.bits)
        return ErrorFeedback(largest, decay=self.decay) if self.decay else largest

    @cached_property
    def _diloco(self) -> DiLoCo:
        return DiLoCo(
            codec=self.codec,
            period=self.period,
            outer_lr=self.outer_lr,
            outer_momentum=0.0,
            delay=self.delay,
        )

    def init(self, replica: Replica) -> DiLoCoState:
        return self._diloco.init(replica)

    async def step(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        await self._diloco.step(state, replica, port)

    def check_elastic(self, minimum: int) -> None:
        self._diloco.check_elastic(minimum)

    async def on_roster_change(
        self, state: DiLoCoState, replica: Replica, port: Port, newcomer: bool
    ) -> None:
        await self._diloco.on_roster_change(state, replica, port, newcomer)

    async def drain(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        await self._diloco.drain(state, replica, port)

    async def publish(self, state: DiLoCoState, replica: Replica, port: Port) -> list[Tensor]:
        return await self._diloco.publish(state, replica, port)
